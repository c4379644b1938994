-- Create a tenant with the hash of its key. A revoked tenant may be created anew; if there are too many tenants, the
-- revoked ones are forgotten, with their limits.
-- KEYS: 1 tenants HASH, 2 tenant-keys HASH, 3 tenant-limits HASH
-- ARGV: 1 name, 2 hash of its key, 3 most tenants that are kept, 4 its limits (coordinator.store.quotas; '' leaves them)
-- Returns {when it was created (ms), its limits ('' none)}, 'exists', or 'full'.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and string.match(known, '^%d+ 0 ') then
  return 'exists'
end
if not known and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if not string.match(all[i + 1], '^%d+ 0 ') then
      redis.call('HDEL', KEYS[1], all[i])
      redis.call('HDEL', KEYS[3], all[i])
    end
  end
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then
    return 'full'
  end
end
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
redis.call('HSET', KEYS[1], ARGV[1], now .. ' 0 ' .. ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[1])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
end
return {now, redis.call('HGET', KEYS[3], ARGV[1]) or ''}
