-- End a verifier's lease.
-- KEYS: 1 verifier:<id> HASH, 2 placements:<id> ZSET, 3 fleet ZSET, 4 identities HASH
-- ARGV: 1 verifier id, 2 instance
-- Returns 1, or 0 if this instance does not hold the lease.
if redis.call('HGET', KEYS[1], 'instance') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return 1
