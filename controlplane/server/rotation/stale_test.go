package rotation

import (
	"fmt"
	"testing"
)

func TestStale(t *testing.T) {
	key := func(signs string, believes ...string) Held {
		return Held{Signs: signs, Believes: append([]string{signs}, believes...)}
	}
	members := func(held ...Held) (out []Member) {
		for i, h := range held {
			out = append(out, Member{Name: fmt.Sprint("cp", i+2), Held: h})
		}
		return out
	}
	away := Member{Name: "cp9", Problem: "it does not answer"}
	step := func(s Step) Record { return Record{Kind: ServiceAccountKey, Step: s, Old: "a", New: "b"} }
	for _, c := range []struct {
		name   string
		rec    Record
		mine   Held
		others []Member
		want   bool
	}{
		{"it came back after the exchange", step(Done), key("a"), members(key("b"), key("b")), true},
		{"it believes the new key and was left out of its use", step(Done), key("a", "b"), members(key("b"), key("b")), true},
		{"the last exchange was of another kind", Record{Kind: EncryptionKey, Step: Done, Old: "x", New: "y"}, key("a"), members(key("b"), key("b")), true},
		{"it missed two exchanges", Record{Kind: ServiceAccountKey, Step: Done, Old: "b", New: "c"}, key("a"), members(key("c"), key("c")), true},
		{"it joined before and began at wait", step(Wait), key("a"), members(key("b", "a"), key("b", "a")), true},
		{"it missed one exchange and the next one begins", Record{Kind: ServiceAccountKey, Step: Trust, Old: "b", New: "c"}, key("a"), members(key("b"), key("b", "c")), true},
		{"of two, and the record says which", step(Done), key("a"), members(key("b")), true},
		{"of two, and nothing says which", Record{}, key("a"), members(key("b")), false},

		{"a healthy one beside it", step(Done), key("b"), members(key("b"), key("a")), false},
		{"a healthy one alone against stale ones", step(Done), key("b"), members(key("a"), key("a")), false},
		{"a healthy one with no record", Record{}, key("b"), members(key("b"), key("a")), false},
		{"no exchange ever", Record{}, key("a"), members(key("a"), key("a")), false},
		{"a given up exchange", step(Aborted), key("a"), members(key("a"), key("a", "b")), false},
		{"it takes the new key at use", step(Use), key("a"), members(key("b", "a"), key("b", "a")), false},
		{"it is first at use", step(Use), key("b", "a"), members(key("a", "b"), key("a", "b")), false},
		{"forced, and at wait both are believed", step(Wait), key("a", "b"), members(key("b", "a"), key("b", "a")), false},
		{"some forget before others", step(Forget), key("b", "a"), members(key("b"), key("b", "a")), false},
		{"a record of another time, which a backup brought", step(Done), key("c"), members(key("c"), key("c")), false},
		{"keys of before a backup's exchange", step(Done), key("a"), members(key("a"), key("a")), false},
		{"most have the keys of before a backup's exchange", step(Done), key("a"), members(key("a"), key("b")), false},
		{"an exchange of another time begins", Record{Kind: ServiceAccountKey, Step: Use, Old: "x", New: "y"}, key("a"), members(key("a"), key("a")), false},
		{"nobody answers", step(Done), key("a"), []Member{away, away}, false},
		{"one is of a release that tells nothing", step(Done), key("a"), []Member{{Name: "cp2"}, away}, false},
		{"alone", step(Done), key("a"), nil, false},
		{"it has no such key", step(Done), Held{}, members(key("b"), key("b")), false},
	} {
		if have := Stale(c.rec, ServiceAccountKey, c.mine, c.others); have != c.want {
			t.Errorf("%s: %v, want %v", c.name, have, c.want)
		}
	}
}

// That nobody contradicts is no confirmation.
func TestConfirmed(t *testing.T) {
	mine := Held{Signs: "b", Believes: []string{"b"}}
	same, other := Member{Name: "same", Held: mine}, Member{Name: "other", Held: Held{Signs: "c", Believes: []string{"c"}}}
	both := Member{Name: "both", Held: Held{Signs: "c", Believes: []string{"c", "b"}}}
	silent, none := Member{Name: "silent", Problem: "no answer", Held: mine}, Member{Name: "none"}
	for _, c := range []struct {
		others []Member
		want   bool
	}{
		{nil, true}, {[]Member{same}, true}, {[]Member{other, same}, true},
		{[]Member{other}, false}, {[]Member{both}, false}, {[]Member{silent}, false}, {[]Member{none}, false}, {[]Member{silent, other}, false},
	} {
		if got := Confirmed(mine, c.others); got != c.want {
			t.Errorf("%+v: %v", c.others, got)
		}
	}
}
