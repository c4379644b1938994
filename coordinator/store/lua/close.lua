-- Forget a session that is over and free its place.
-- KEYS: 1 session:<id> HASH, 2 telemetry:<id> HASH, 3 closed:<id> STRING, then placements:<verifier> ZSET of each
--       verifier that may hold a place for it
-- ARGV: 1 session id, 2 ms for which one of its tickets may be valid
for i = 4, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
if redis.call('GET', KEYS[3]) ~= 'killed' then
  redis.call('SET', KEYS[3], '1', 'PX', ARGV[2])
end
return redis.call('DEL', KEYS[1], KEYS[2])
