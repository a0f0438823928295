package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

var limitParts = []part{
	{"Limits", checkLimits},
	{"Names", checkKeyNames},
	{"Quota", checkQuota},
}

func checkLimits(t *testing.T, s Subject) {
	c := newCaller(t, s)
	c.mustCommit(raftstore.Put("/start", nil))
	big := bytes.Repeat([]byte{1}, raftstore.MaxValueBytes)
	c.mustFail(raftstore.ErrInvalid)
	c.mustFail(raftstore.ErrInvalid, raftstore.Put("", []byte("x")))
	c.mustFail(raftstore.ErrInvalid, raftstore.Put("/\xff", nil))
	c.mustFail(raftstore.ErrInvalid, raftstore.Put("/a", nil), raftstore.Delete("/a"))
	c.mustFail(raftstore.ErrInvalid, raftstore.Op{Kind: 9, Key: "/a"})
	c.mustFail(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpDelete, Key: "/a", TTL: time.Second})
	c.mustFail(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpPut, Key: "/a",
		If: raftstore.Precondition{Absent: true, Revision: 1}})
	c.mustFail(raftstore.ErrTooLarge, raftstore.Put("/"+strings.Repeat("k", raftstore.MaxKeyBytes), nil))
	c.mustFail(raftstore.ErrTooLarge, raftstore.Put("/a", append(big, 1)))
	var many, heavy []raftstore.Op
	for i := range raftstore.MaxCommitOps + 1 {
		many = append(many, raftstore.Put(fmt.Sprintf("/m/%d", i), nil))
	}
	c.mustFail(raftstore.ErrTooLarge, many...)
	for i := range 6 {
		heavy = append(heavy, raftstore.Put(fmt.Sprintf("/h/%d", i), big))
	}
	c.mustFail(raftstore.ErrTooLarge, heavy...)
	c.mustCommit(raftstore.Put("/big", big))
	c.mustHaveValue("/big", string(big))
	c.mustCommit(many[:raftstore.MaxCommitOps]...)
}

// checkKeyNames checks that keys may be any valid UTF-8 strings, are ordered by bytes, and match
// prefixes by bytes.
func checkKeyNames(t *testing.T, s Subject) {
	c := newCaller(t, s)
	inOrder := []string{
		"\x00", " ", "/", "/a", "/a\x00", "/a/", "/a/b", "/b", "a", "é", "日本", "\U0010ffff",
		strings.Repeat("z", raftstore.MaxKeyBytes-1) + "z",
	}
	for i := range inOrder {
		c.mustCommit(raftstore.Create(inOrder[len(inOrder)-1-i], []byte(inOrder[len(inOrder)-1-i])))
	}
	l := c.mustList("", raftstore.ListOptions{})
	for i := 1; i < len(l.Items); i++ {
		if l.Items[i-1].Key >= l.Items[i].Key {
			t.Errorf("%q before %q", l.Items[i-1].Key, l.Items[i].Key)
		}
	}
	if len(l.Items) != len(inOrder) {
		t.Errorf("list shows %d of %d keys", len(l.Items), len(inOrder))
	}
	for prefix, want := range map[string]int{"/a": 4, "/a/": 2, "/a\x00": 1, "\U0010ffff": 1, "z": 1, "日": 1, "/c": 0} {
		if l := c.mustList(prefix, raftstore.ListOptions{}); len(l.Items) != want {
			t.Errorf("list of %q: %q, want %d keys", prefix, joinedKeys(l), want)
		}
	}
	for _, key := range inOrder {
		c.mustHaveValue(key, key)
	}
	c.mustBeAbsent("/a/c")
	c.mustBeAbsent("")
	c.mustFail(raftstore.ErrInvalid, raftstore.Put("/half\xe6\x97", nil))
	c.mustFail(raftstore.ErrInvalid, raftstore.Delete(""))
	c.mustFail(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpCheck, Key: ""})
	negative := raftstore.Put("/ttl", nil)
	negative.TTL = -time.Second
	c.mustFail(raftstore.ErrInvalid, negative)
	negative.TTL = -1 // less than a millisecond is not 0
	c.mustFail(raftstore.ErrInvalid, negative)
	withValue := raftstore.Delete("/a")
	withValue.Value = []byte("x")
	c.mustFail(raftstore.ErrInvalid, withValue)
	// One invalid op makes the whole commit invalid.
	c.mustFail(raftstore.ErrInvalid, raftstore.Put("/new", nil), raftstore.Put("", nil))
	c.mustBeAbsent("/new")
	if _, err := s.Store.List(c.ctx, "/", raftstore.ListOptions{Limit: -1}); !errors.Is(err, raftstore.ErrInvalid) {
		t.Errorf("list with a negative limit: %v", err)
	}
}

// quotaChunks is the number of large values that together reach the quota.
const quotaChunks = 24

// checkQuota checks a store beyond its space quota. It must accept deletes, reads and small
// updates, and return ErrNoSpace for new keys. After enough keys are deleted, it must accept new
// keys again.
func checkQuota(t *testing.T, s Subject) {
	if s.Quota == 0 {
		return
	}
	c := newCaller(t, s)
	chunk := bytes.Repeat([]byte{7}, int(s.Quota/quotaChunks))
	var seeds []raftstore.Op
	for i := range raftstore.MaxCommitOps - 8 {
		seeds = append(seeds, raftstore.Put(fmt.Sprintf("/seed/%d", i), nil))
	}
	c.mustCommit(seeds...)
	full, n := false, 0
	for ; !full && n < 2*quotaChunks+16; n++ {
		_, err := s.Store.Commit(c.ctx,
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/q/%d", n), chunk)}})
		if full = errors.Is(err, raftstore.ErrNoSpace); err != nil && !full {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	if !full {
		t.Fatalf("%d values of %d bytes are stored with a quota of %d bytes", n, len(chunk), s.Quota)
	}
	if n < quotaChunks/2 {
		t.Errorf("full after %d values of %d bytes with a quota of %d bytes", n, len(chunk), s.Quota)
	}
	c.mustFail(raftstore.ErrNoSpace, raftstore.Put("/small", nil))
	c.mustFail(raftstore.ErrNoSpace, raftstore.Delete("/q/1"), raftstore.Put("/small", nil))
	if l := c.mustList("/q/", raftstore.ListOptions{}); len(l.Items) != n-1 {
		t.Errorf("%d items of %d when full", len(l.Items), n-1)
	}
	c.mustCommit(raftstore.Op{Kind: raftstore.OpCheck, Key: "/q/0"})
	updatesWhenFull(t, c, n-1, len(chunk), seeds)
	for i := range n - 1 {
		c.mustCommit(raftstore.Delete(fmt.Sprintf("/q/%d", i)))
	}
	s.Compact(s.Store.Applied())
	for {
		_, err := s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/small", []byte("fits"))}})
		if err == nil {
			break
		}
		if !errors.Is(err, raftstore.ErrNoSpace) {
			t.Fatalf("put after deleting enough: %v", err)
		}
	}
	c.mustHaveValue("/small", "fits")
}

// updatesWhenFull checks a store that has exceeded its quota: existing keys can be updated any
// number of times, while the state grows only a little. The store contains n large values of size
// bytes at /q/0, /q/1 and so on, and small values at the keys of seeds.
func updatesWhenFull(t *testing.T, c caller, n, size int, seeds []raftstore.Op) {
	value := bytes.Repeat([]byte{8}, size)
	at := c.mustCommit(raftstore.Put("/q/0", append(value, make([]byte, 1<<10)...)))
	c.mustFail(raftstore.ErrNoSpace, raftstore.Put("/q/1", append(value, make([]byte, 1<<10+1)...)))
	c.mustFail(raftstore.ErrNoSpace, raftstore.Put("/q/1", value), raftstore.Put("/small", nil))
	c.mustFail(raftstore.ErrNoSpace, raftstore.Delete("/q/1"), raftstore.Create("/small", nil))
	// A failed precondition is reported before the lack of space.
	c.mustConflict("/q/0", raftstore.Update("/q/0", value, at+1000))
	c.mustConflict("/q/0", raftstore.Create("/q/0", nil))
	c.mustConflict("/small", raftstore.Update("/small", nil, at))
	// More than the reserve: history has space for one commit, and the state may grow by a MiB.
	replaced := (raftstore.MaxCommitBytes + 4<<20) / size
	for i := range replaced {
		at = c.mustCommit(raftstore.Put(fmt.Sprintf("/q/%d", i%n), value))
	}
	c.mustHaveValue("/q/0", string(value))
	if _, err := c.s.List(c.ctx, "/q/", raftstore.ListOptions{At: at - raftstore.Revision(replaced-1)}); !errors.Is(err,
		raftstore.ErrCompacted) {
		t.Errorf("%d values of %d bytes were replaced in a full store, and all of them are still kept: %v",
			replaced, size, err)
	}
	// Small values grow in turn until their growth would be large in total.
	var err error
	grown := 0
	for ; err == nil && grown < 64; grown++ {
		ops := make([]raftstore.Op, len(seeds))
		for i := range seeds {
			ops[i] = raftstore.Put(seeds[i].Key, make([]byte, (grown+1)<<10))
		}
		_, err = c.s.Commit(c.ctx, raftstore.Commit{Ops: ops})
	}
	if !errors.Is(err, raftstore.ErrNoSpace) || grown < 2 {
		t.Errorf("%d values of a full store grew to %d KiB each: %v", len(seeds), grown, err)
	}
	for i := range 10 {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/q/%d", i%n), value))
	}
	c.mustCommit(raftstore.Put(seeds[0].Key, nil))
	c.mustFail(raftstore.ErrNoSpace, raftstore.Put("/small", nil))
}
