-- What a verifier reports about sessions; a zombie's figures never replace those of a greater epoch.
-- KEYS: stats:<session> HASH and closed:<session> STRING, a pair for each session
-- ARGV: 1 verifier id, 2 ms to keep them, then 8 for each session: tenant, epoch (20 digits, so that text compares
--       as numbers do), steps, committed, evaluated, accepted, rtt ms, session id
for i = 1, #KEYS, 2 do
  local key = KEYS[i]
  local at = 3 + (i - 1) / 2 * 8
  local epoch = redis.call('HGET', key, 'epoch')
  if redis.call('EXISTS', KEYS[i + 1]) == 0 and (not epoch or epoch <= ARGV[at + 1]) then
    redis.call('HSET', key, 'verifier', ARGV[1], 'tenant', ARGV[at], 'epoch', ARGV[at + 1], 'steps', ARGV[at + 2],
      'committed', ARGV[at + 3], 'evaluated', ARGV[at + 4], 'accepted', ARGV[at + 5], 'rtt_ms', ARGV[at + 6],
      'session', ARGV[at + 7])
    redis.call('PEXPIRE', key, ARGV[2])
  end
end
return #KEYS / 2
