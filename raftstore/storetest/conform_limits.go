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
	{"Limits", limits},
	{"Names", names},
	{"Quota", quota},
}

func limits(t *testing.T, s Subject) {
	c := call(t, s)
	c.commit(raftstore.Put("/start", nil))
	big := bytes.Repeat([]byte{1}, raftstore.MaxValueBytes)
	c.refused(raftstore.ErrInvalid)
	c.refused(raftstore.ErrInvalid, raftstore.Put("", []byte("x")))
	c.refused(raftstore.ErrInvalid, raftstore.Put("/\xff", nil))
	c.refused(raftstore.ErrInvalid, raftstore.Put("/a", nil), raftstore.Delete("/a"))
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: 9, Key: "/a"})
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpDelete, Key: "/a", TTL: time.Second})
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpPut, Key: "/a", If: raftstore.Precondition{Absent: true, Revision: 1}})
	c.refused(raftstore.ErrTooLarge, raftstore.Put("/"+strings.Repeat("k", raftstore.MaxKeyBytes), nil))
	c.refused(raftstore.ErrTooLarge, raftstore.Put("/a", append(big, 1)))
	var many, heavy []raftstore.Op
	for i := range raftstore.MaxCommitOps + 1 {
		many = append(many, raftstore.Put(fmt.Sprintf("/m/%d", i), nil))
	}
	c.refused(raftstore.ErrTooLarge, many...)
	for i := range 6 {
		heavy = append(heavy, raftstore.Put(fmt.Sprintf("/h/%d", i), big))
	}
	c.refused(raftstore.ErrTooLarge, heavy...)
	c.commit(raftstore.Put("/big", big))
	c.value("/big", string(big))
	c.commit(many[:raftstore.MaxCommitOps]...)
}

// names: keys are any valid UTF-8, ordered by their bytes, and prefixes are
// prefixes of bytes.
func names(t *testing.T, s Subject) {
	c := call(t, s)
	inOrder := []string{
		"\x00", " ", "/", "/a", "/a\x00", "/a/", "/a/b", "/b", "a", "é", "日本", "\U0010ffff",
		strings.Repeat("z", raftstore.MaxKeyBytes-1) + "z",
	}
	for i := range inOrder {
		c.commit(raftstore.Create(inOrder[len(inOrder)-1-i], []byte(inOrder[len(inOrder)-1-i])))
	}
	l := c.list("", raftstore.ListOptions{})
	for i := 1; i < len(l.Items); i++ {
		if l.Items[i-1].Key >= l.Items[i].Key {
			t.Errorf("%q before %q", l.Items[i-1].Key, l.Items[i].Key)
		}
	}
	if len(l.Items) != len(inOrder) {
		t.Errorf("list shows %d of %d keys", len(l.Items), len(inOrder))
	}
	for prefix, want := range map[string]int{"/a": 4, "/a/": 2, "/a\x00": 1, "\U0010ffff": 1, "z": 1, "日": 1, "/c": 0} {
		if l := c.list(prefix, raftstore.ListOptions{}); len(l.Items) != want {
			t.Errorf("list of %q: %q, want %d keys", prefix, keys(l), want)
		}
	}
	for _, key := range inOrder {
		c.value(key, key)
	}
	c.absent("/a/c")
	c.absent("")
	c.refused(raftstore.ErrInvalid, raftstore.Put("/half\xe6\x97", nil))
	c.refused(raftstore.ErrInvalid, raftstore.Delete(""))
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpCheck, Key: ""})
	negative := raftstore.Put("/ttl", nil)
	negative.TTL = -time.Second
	c.refused(raftstore.ErrInvalid, negative)
	withValue := raftstore.Delete("/a")
	withValue.Value = []byte("x")
	c.refused(raftstore.ErrInvalid, withValue)
	// One bad op spoils a commit as a whole.
	c.refused(raftstore.ErrInvalid, raftstore.Put("/new", nil), raftstore.Put("", nil))
	c.absent("/new")
	if _, err := s.Store.List(c.ctx, "/", raftstore.ListOptions{Limit: -1}); !errors.Is(err, raftstore.ErrInvalid) {
		t.Errorf("list with a negative limit: %v", err)
	}
}

// quota: a store that is full takes deletions and reads, says so, and takes
// puts again when there is room.
func quota(t *testing.T, s Subject) {
	if s.Quota == 0 {
		return
	}
	c := call(t, s)
	chunk := bytes.Repeat([]byte{7}, 1<<20)
	full, n := false, 0
	for ; !full && int64(n) < 2*s.Quota>>20+16; n++ {
		_, err := s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/q/%d", n), chunk)}})
		if full = errors.Is(err, raftstore.ErrNoSpace); err != nil && !full {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	if !full {
		t.Fatalf("%d MiB are stored with a quota of %d bytes", n, s.Quota)
	}
	if int64(n)<<20 < s.Quota/2 {
		t.Errorf("full after %d MiB with a quota of %d bytes", n, s.Quota)
	}
	c.refused(raftstore.ErrNoSpace, raftstore.Put("/small", nil))
	c.refused(raftstore.ErrNoSpace, raftstore.Delete("/q/1"), raftstore.Put("/small", nil))
	if l := c.list("/q/", raftstore.ListOptions{}); len(l.Items) != n-1 {
		t.Errorf("%d items of %d when full", len(l.Items), n-1)
	}
	c.commit(raftstore.Op{Kind: raftstore.OpCheck, Key: "/q/0"})
	for i := range n - 1 {
		c.commit(raftstore.Delete(fmt.Sprintf("/q/%d", i)))
	}
	s.Compact(s.Store.Applied())
	for {
		_, err := s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/small", []byte("fits"))}})
		if err == nil {
			break
		}
		if !errors.Is(err, raftstore.ErrNoSpace) {
			t.Fatalf("put after making room: %v", err)
		}
	}
	c.value("/small", "fits")
}
