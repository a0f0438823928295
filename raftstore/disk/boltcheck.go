package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
)

// checkBolt reads the pages of a bbolt file as they lie there, before bbolt
// does. bbolt has checksums on its two meta pages only, goes back to the older
// one without a word when the newer one is damaged, and trusts all other pages:
// a wrong number there makes it panic, recurse for ever, or overwrite pages in
// use. Here every page in use must be what its parent takes it for, in one
// place only, with its keys in order; then whatever is wrong inside of values
// is found by their own checksums.
//
// It returns the value of the stable store's record.
func checkBolt(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	c := boltCheck{f: f, size: info.Size(), seen: make(map[uint64]struct{})}
	if err := c.run(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.record, nil
}

type boltCheck struct {
	f      io.ReaderAt
	size   int64
	page   int64
	high   uint64 // pages at and beyond are not in use
	seen   map[uint64]struct{}
	record []byte
}

// ErrDataFormat reports a data directory of another version.
var ErrDataFormat = errors.New("raftstore: data directory has a format that this version does not read")

// oldOwner is a key that the first versions kept in the stable store.
const oldOwner = "keelson.dev/replica"

const (
	boltPageHead    = 16
	boltElement     = 16
	boltMetaMagic   = 0xED0CDAED
	boltMetaVersion = 2
	boltBranch      = 1
	boltLeaf        = 2
	boltMetaPage    = 4
	boltNoFreelist  = ^uint64(0)
	boltBucketFlag  = 1
	boltDepth       = 32
)

func (c *boltCheck) bad(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrCorruptLog)
}

type boltMeta struct {
	pageSize uint32
	root     uint64
	freelist uint64
	high     uint64
	tx       uint64
}

// meta reads meta page n. A page written over by a crash is the old or the
// new one, because all that counts of it lies in one sector.
func (c *boltCheck) meta(n, at int64) (boltMeta, error) {
	var b [boltPageHead + 64]byte
	if _, err := c.f.ReadAt(b[:], at); err != nil {
		if errors.Is(err, io.EOF) {
			return boltMeta{}, c.bad("file of %d bytes ends before meta page %d", c.size, n)
		}
		return boltMeta{}, err
	}
	m := b[boltPageHead:]
	h := fnv.New64a()
	h.Write(m[:56])
	le := binary.LittleEndian
	if le.Uint64(b[:]) != uint64(n) || le.Uint16(b[8:]) != boltMetaPage ||
		le.Uint32(m) != boltMetaMagic || le.Uint32(m[4:]) != boltMetaVersion || le.Uint64(m[56:]) != h.Sum64() {
		return boltMeta{}, c.bad("meta page %d is damaged", n)
	}
	return boltMeta{pageSize: le.Uint32(m[8:]), root: le.Uint64(m[16:]), freelist: le.Uint64(m[32:]), high: le.Uint64(m[40:]), tx: le.Uint64(m[48:])}, nil
}

func (c *boltCheck) run() error {
	m, err := c.meta(0, 0)
	if err != nil {
		return err
	}
	if c.page = int64(m.pageSize); c.page < 1<<10 || c.page > 1<<16 || c.page&(c.page-1) != 0 {
		return c.bad("pages of %d bytes", c.page)
	}
	m1, err := c.meta(1, c.page)
	if err != nil {
		return err
	}
	if m1.tx > m.tx {
		m, m1 = m1, m
	}
	switch {
	case m.tx != m1.tx+1 || m.pageSize != m1.pageSize:
		return c.bad("meta pages are of transactions %d and %d", m1.tx, m.tx)
	case m.freelist != boltNoFreelist && m.tx > 1:
		return c.bad("free pages are listed on page %d", m.freelist)
	case m.high > uint64(c.size/c.page):
		return c.bad("%d bytes where %d pages of %d were written", c.size, m.high, c.page)
	}
	c.high = m.high
	buckets := 0
	err = c.walk(m.root, nil, nil, 0, func(flags uint32, k, v []byte) error {
		buckets++
		if flags != boltBucketFlag || len(v) < boltPageHead {
			return c.bad("%q is no bucket", k)
		}
		switch string(k) {
		case "conf":
			return c.conf(v)
		case "logs":
			return c.logs(v)
		default:
			return c.bad("there is a bucket %q", k)
		}
	})
	if err == nil && (buckets != 2 || c.record == nil) {
		err = c.bad("no record of a replica")
	}
	return err
}

// conf is the bucket of the stable store: one record, inside of the root page.
func (c *boltCheck) conf(v []byte) error {
	if binary.LittleEndian.Uint64(v) != 0 {
		return c.bad("the record is not in the root page")
	}
	return c.inline(v, func(flags uint32, k, v []byte) error {
		if string(k) == oldOwner || string(k) == "CurrentTerm" {
			return fmt.Errorf("it was made by a version without checksums on votes: %w", ErrDataFormat)
		}
		if flags != 0 || !bytes.Equal(k, keyRecord) {
			return c.bad("the stable store holds %q", k)
		}
		if _, err := decodeRecord(v); err != nil {
			return err
		}
		c.record = bytes.Clone(v)
		return nil
	})
}

// logs is the bucket of the log: entries by index.
func (c *boltCheck) logs(v []byte) error {
	entry := func(flags uint32, k, v []byte) error {
		if flags != 0 || len(k) != 8 {
			return c.bad("the log holds %q", k)
		}
		return nil
	}
	if root := binary.LittleEndian.Uint64(v); root != 0 {
		return c.walk(root, nil, nil, 0, entry)
	}
	return c.inline(v, entry)
}

// inline reads a bucket that lies in the value itself.
func (c *boltCheck) inline(v []byte, visit func(flags uint32, k, v []byte) error) error {
	b := bytes.Clone(v[16:]) // a bucket's head has 16 bytes
	if len(b) < boltPageHead || binary.LittleEndian.Uint16(b[8:]) != boltLeaf {
		return c.bad("a bucket is damaged")
	}
	_, err := c.elements(b, nil, nil, true, visit)
	return err
}

// walk reads a page and those below. All keys must lie in [from, to).
func (c *boltCheck) walk(id uint64, from, to []byte, depth int, visit func(flags uint32, k, v []byte) error) error {
	b, err := c.read(id)
	if err != nil {
		return err
	}
	leaf := binary.LittleEndian.Uint16(b[8:]) == boltLeaf
	children, err := c.elements(b, from, to, leaf, visit)
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	if leaf {
		if len(children) == 0 && depth > 0 {
			return c.bad("page %d is empty", id)
		}
		return nil
	}
	if len(children) == 0 || depth == boltDepth {
		return c.bad("page %d, %d below the root, has %d below it", id, depth, len(children))
	}
	for i, child := range children {
		end := to
		if i+1 < len(children) {
			end = children[i+1].key
		}
		if err := c.walk(child.page, child.key, end, depth+1, visit); err != nil {
			return err
		}
	}
	return nil
}

// read reads a page with all that overflows from it.
func (c *boltCheck) read(id uint64) ([]byte, error) {
	if id < 2 || id >= c.high {
		return nil, c.bad("page %d is out of bounds", id)
	}
	b := make([]byte, c.page)
	if _, err := c.f.ReadAt(b, int64(id)*c.page); err != nil {
		return nil, fmt.Errorf("reading page %d: %w", id, err)
	}
	flags, overflow := binary.LittleEndian.Uint16(b[8:]), uint64(binary.LittleEndian.Uint32(b[12:]))
	if binary.LittleEndian.Uint64(b) != id || flags != boltLeaf && flags != boltBranch || id+overflow >= c.high {
		return nil, c.bad("page %d is damaged", id)
	}
	for i := id; i <= id+overflow; i++ {
		if _, twice := c.seen[i]; twice {
			return nil, c.bad("page %d is in two places", i)
		}
		c.seen[i] = struct{}{}
	}
	if overflow > 0 {
		b = append(b, make([]byte, int64(overflow)*c.page)...)
		if _, err := c.f.ReadAt(b[c.page:], int64(id+1)*c.page); err != nil {
			return nil, fmt.Errorf("reading page %d: %w", id+1, err)
		}
	}
	return b, nil
}

type boltChild struct {
	key  []byte
	page uint64
}

// elements reads what a page lists, in order and within bounds.
func (c *boltCheck) elements(b []byte, from, to []byte, leaf bool, visit func(flags uint32, k, v []byte) error) ([]boltChild, error) {
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if boltPageHead+count*boltElement > len(b) {
		return nil, c.bad("%d elements in %d bytes", count, len(b))
	}
	out := make([]boltChild, 0, count)
	var last []byte
	for i := range count {
		at := boltPageHead + i*boltElement
		e := b[at : at+boltElement]
		var flags, pos, ksize, vsize uint32
		var page uint64
		if leaf {
			flags, pos, ksize, vsize = le32(e), le32(e[4:]), le32(e[8:]), le32(e[12:])
		} else {
			pos, ksize, page = le32(e), le32(e[4:]), binary.LittleEndian.Uint64(e[8:])
		}
		start := uint64(at) + uint64(pos)
		if start < uint64(boltPageHead+count*boltElement) || start+uint64(ksize)+uint64(vsize) > uint64(len(b)) || ksize == 0 {
			return nil, c.bad("element %d reaches from %d for %d and %d bytes", i, start, ksize, vsize)
		}
		k := b[start : start+uint64(ksize)]
		if last != nil && bytes.Compare(k, last) <= 0 || bytes.Compare(k, from) < 0 || to != nil && bytes.Compare(k, to) >= 0 {
			return nil, c.bad("key %q of element %d is out of order", k, i)
		}
		last = k
		out = append(out, boltChild{k, page})
		if leaf {
			if err := visit(flags, k, b[start+uint64(ksize):start+uint64(ksize)+uint64(vsize)]); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
