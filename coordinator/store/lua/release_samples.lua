-- Read all samples of a trial, if there are more than the caller knows.
-- KEYS: 1 samples LIST
-- ARGV: 1 number that the caller knows
-- Returns {their number, then all of them, or none if the caller knows them}.
local count = redis.call('LLEN', KEYS[1])
if count == tonumber(ARGV[1]) then
  return {count}
end
local answer = redis.call('LRANGE', KEYS[1], 0, -1)
table.insert(answer, 1, count)
return answer
