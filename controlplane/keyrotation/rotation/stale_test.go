package rotation

import (
	"fmt"
	"testing"
)

func TestStale(t *testing.T) {
	key := func(signs string, believes ...string) KeyIDs {
		return KeyIDs{Signing: signs, Trusted: append([]string{signs}, believes...)}
	}
	members := func(held ...KeyIDs) (out []Member) {
		for i, h := range held {
			out = append(out, Member{Name: fmt.Sprint("cp", i+2), Keys: h})
		}
		return out
	}
	away := Member{Name: "cp9", Problem: "it does not answer"}
	step := func(s Step) Record { return Record{Kind: ServiceAccountKey, Step: s, Old: "a", New: "b"} }
	for _, c := range []struct {
		name   string
		rec    Record
		mine   KeyIDs
		others []Member
		want   bool
	}{
		{"away during the rotation", step(Done), key("a"), members(key("b"), key("b")), true},
		{"trusts the new key and was skipped at use", step(Done), key("a", "b"),
			members(key("b"), key("b")), true},
		{"the last rotation was of another kind", Record{Kind: EncryptionKey, Step: Done, Old: "x", New: "y"}, key("a"),
			members(key("b"), key("b")), true},
		{"missed two rotations", Record{Kind: ServiceAccountKey, Step: Done, Old: "b", New: "c"}, key("a"),
			members(key("c"), key("c")), true},
		{"joined before the rotation, started at wait", step(Wait), key("a"),
			members(key("b", "a"), key("b", "a")), true},
		{"missed a rotation, and the next one starts",
			Record{Kind: ServiceAccountKey, Step: Trust, Old: "b", New: "c"}, key("a"),
			members(key("b"), key("b", "c")), true},
		{"one of two, and the record decides", step(Done), key("a"), members(key("b")), true},
		{"one of two, without a record", Record{}, key("a"), members(key("b")), false},

		{"a current replica and a stale one", step(Done), key("b"), members(key("b"), key("a")), false},
		{"a current replica and two stale ones", step(Done), key("b"), members(key("a"), key("a")), false},
		{"a current replica without a record", Record{}, key("b"), members(key("b"), key("a")), false},
		{"no rotation", Record{}, key("a"), members(key("a"), key("a")), false},
		{"aborted rotation", step(Aborted), key("a"), members(key("a"), key("a", "b")), false},
		{"receives the new key at use", step(Use), key("a"), members(key("b", "a"), key("b", "a")), false},
		{"first to use the new key", step(Use), key("b", "a"), members(key("a", "b"), key("a", "b")), false},
		{"forced, and both keys are trusted at wait", step(Wait), key("a", "b"),
			members(key("b", "a"), key("b", "a")), false},
		{"some members removed the old key first", step(Forget), key("b", "a"),
			members(key("b"), key("b", "a")), false},
		{"unrelated record of a restored backup", step(Done), key("c"), members(key("c"), key("c")), false},
		{"keys from before the rotation in a backup", step(Done), key("a"), members(key("a"), key("a")), false},
		{"most have the keys from before the rotation in a backup", step(Done), key("a"),
			members(key("a"), key("b")), false},
		{"an unrelated rotation starts", Record{Kind: ServiceAccountKey, Step: Use, Old: "x", New: "y"}, key("a"),
			members(key("a"), key("a")), false},
		{"no response", step(Done), key("a"), []Member{away, away}, false},
		{"a release that reports no keys", step(Done), key("a"), []Member{{Name: "cp2"}, away}, false},
		{"single replica", step(Done), key("a"), nil, false},
		{"no key of the kind", step(Done), KeyIDs{}, members(key("b"), key("b")), false},
	} {
		if have := IsStale(c.rec, ServiceAccountKey, c.mine, c.others); have != c.want {
			t.Errorf("%s: %v, want %v", c.name, have, c.want)
		}
	}
}

// Keys are not confirmed by the absence of a contradiction.
func TestConfirmed(t *testing.T) {
	mine := KeyIDs{Signing: "b", Trusted: []string{"b"}}
	same, other := Member{Name: "same", Keys: mine},
		Member{Name: "other", Keys: KeyIDs{Signing: "c", Trusted: []string{"c"}}}
	both := Member{Name: "both", Keys: KeyIDs{Signing: "c", Trusted: []string{"c", "b"}}}
	silent, none := Member{Name: "silent", Problem: "no answer", Keys: mine}, Member{Name: "none"}
	for _, c := range []struct {
		others []Member
		want   bool
	}{
		{nil, true}, {[]Member{same}, true}, {[]Member{other, same}, true},
		{[]Member{other}, false}, {[]Member{both}, false}, {[]Member{silent}, false}, {[]Member{none}, false},
		{[]Member{silent, other}, false},
	} {
		if got := IsConfirmed(mine, c.others); got != c.want {
			t.Errorf("%+v: %v", c.others, got)
		}
	}
}
