-- All samples of a trial, if there are others than the caller knows.
-- KEYS: 1 samples LIST
-- ARGV: 1 how many the caller knows
-- Returns {how many there are, then all of them, or none where the caller knows them}.
local count = redis.call('LLEN', KEYS[1])
if count == tonumber(ARGV[1]) then
  return {count}
end
local answer = redis.call('LRANGE', KEYS[1], 0, -1)
table.insert(answer, 1, count)
return answer
