-- Register a verifier, or renew its registration.
-- KEYS: 1 verifier:<id> HASH, 2 placements:<id> ZSET, 3 fleet ZSET, 4 identities HASH
-- ARGV: 1 verifier id, 2 instance, 3 lease ms, 4 identity, then field, value, ... of the registration
-- Returns 1 if it replaced another instance whose lease had not ended, else 0.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local before = redis.call('HGET', KEYS[1], 'instance')
local replaced = before and before ~= ARGV[2]
if replaced then
  redis.call('DEL', KEYS[2]) -- its sessions died with it
end
redis.call('DEL', KEYS[1])
for i = 5, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('HSET', KEYS[1], 'instance', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
return replaced and 1 or 0
