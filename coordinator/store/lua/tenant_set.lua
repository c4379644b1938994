-- Set limits of a tenant.
-- KEYS: 1 tenants HASH, 2 tenant-limits HASH, 3 exhausted ZSET, which the next report of its tokens brings it into again
-- ARGV: 1 tenant, 2 whether it is known otherwise (0/1), 3 whether limits that are not given are the coordinator's again
--       (0/1), 4 limits (coordinator.store.quotas), '-' where none is given
-- Returns 1, or 0 if there is no such tenant.
if ARGV[2] == '0' and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return 0
end
local before = ARGV[3] == '0' and redis.call('HGET', KEYS[2], ARGV[1]) or ''
local known = string.gmatch(before, '%S+')
local limits = {}
for given in string.gmatch(ARGV[4], '%S+') do
  local own = known() or '-'
  limits[#limits + 1] = given == '-' and own or given
end
redis.call('HSET', KEYS[2], ARGV[1], table.concat(limits, ' '))
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
