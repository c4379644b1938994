-- Take a place on a verifier for a session, and use up two ranges of epochs.
-- KEYS: 1 session:<id> HASH, 2 placements:<verifier> ZSET, 3 tenant-places:<tenant> ZSET
-- ARGV: 1 session id, 2 places of the verifier, 3 whether the tenant's places are counted (0/1) and 4 their limit (0 none),
--       5 ms for which the place is kept before the device attaches, 6 ms for which the session's record is kept before,
--       7 greatest epoch that the caller knows, 8 epochs in a range, then field, value, ... of the session's record
-- Returns {first epoch, end of the place (ms), ''}, or {0, 0, why not}: full, places, or how the session has ended.
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)
local known = redis.call('HMGET', KEYS[1], 'closed', 'live', 'epoch_last')
if known[1] then return {0, 0, known[1]} end

-- Return how many other sessions have a place in a sorted set.
local function others(key)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now))
  return redis.call('ZCARD', key) - (redis.call('ZSCORE', key, ARGV[1]) and 1 or 0)
end

local counted, limit = ARGV[3] == '1', tonumber(ARGV[4])
if others(KEYS[2]) >= tonumber(ARGV[2]) then return {0, 0, 'full'} end
if counted and limit > 0 and others(KEYS[3]) >= limit then return {0, 0, 'places'} end

-- The epoch is greater than any given out before: by the record, by the clock if that was lost, by what the device saw.
local epoch = math.max(micros, tonumber(known[3] or '0') + 1, tonumber(ARGV[7]) + 1)
local ends = string.format('%.0f', now + tonumber(ARGV[5]))
for i = 2, counted and 3 or 2 do
  redis.call('ZADD', KEYS[i], ends, ARGV[1])
  redis.call('PEXPIRE', KEYS[i], 86400000) -- so that a verifier that never returns leaves nothing
end
redis.call('HSET', KEYS[1], 'epoch_last', string.format('%.0f', epoch + 2 * tonumber(ARGV[8]) - 1), unpack(ARGV, 9))
if known[2] then
  redis.call('HINCRBY', KEYS[1], 'moves', 1)
else
  redis.call('PEXPIRE', KEYS[1], ARGV[6]) -- reports prolong it
end
return {string.format('%.0f', epoch), ends, ''}
