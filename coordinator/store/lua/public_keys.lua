-- Vouch for a coordinator's own public key, unless it was revoked, and return the keys of all coordinators.
-- KEYS: 1 public-keys ZSET, 2 public-key-proofs HASH, 3 revoked-keys ZSET
-- ARGV: 1 own entry "key id:hex", 2 its proof or "", 3 own key id, 4 ms after which a key that no coordinator vouches for
--       is forgotten, 5 most keys in the reply, 6 most revoked ones
-- Returns {entry, proof or "", time in ms that a coordinator vouched for it last, of each key, the latest last}, and
-- {key id, time in ms, of each revoked key}.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if not redis.call('ZSCORE', KEYS[3], ARGV[3]) then
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
  if ARGV[2] ~= '' then redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end
end
local forgotten = string.format('%.0f', now - tonumber(ARGV[4]))
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', forgotten)) do
  redis.call('ZREM', KEYS[1], entry)
  redis.call('HDEL', KEYS[2], entry)
end
local found = {}
local known = redis.call('ZRANGE', KEYS[1], -tonumber(ARGV[5]), -1, 'WITHSCORES')
for i = 1, #known, 2 do
  found[#found + 1] = known[i]
  found[#found + 1] = redis.call('HGET', KEYS[2], known[i]) or ''
  found[#found + 1] = known[i + 1]
end
return {found, redis.call('ZRANGE', KEYS[3], -tonumber(ARGV[6]), -1, 'WITHSCORES')}
