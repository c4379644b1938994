-- Revoke a tenant's key; the tenant's record is kept.
-- KEYS: 1 tenants HASH, 2 tenant-keys HASH
-- ARGV: 1 name
-- Returns its record, or '' if there is no such tenant.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if not known then
  return ''
end
local created, revoked, hash = string.match(known, '^(%d+) (%d+) (%x*)$')
if revoked == '0' then
  local time = redis.call('TIME')
  local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  known = created .. ' ' .. now .. ' '
  redis.call('HDEL', KEYS[2], hash)
  redis.call('HSET', KEYS[1], ARGV[1], known)
end
return known
