-- Read the releases of one track (keys.RELEASES), or of all.
-- KEYS: 1 releases HASH, 2 release-serial STRING
-- ARGV: 1 key of a track, '' all
-- Returns {serial ('0' if there is none), then key and JSON of each track}.
local answer = {redis.call('GET', KEYS[2]) or '0'}
if ARGV[1] == '' then
  for _, part in ipairs(redis.call('HGETALL', KEYS[1])) do
    answer[#answer + 1] = part
  end
else
  local track = redis.call('HGET', KEYS[1], ARGV[1])
  if track then
    answer[2], answer[3] = ARGV[1], track
  end
end
return answer
