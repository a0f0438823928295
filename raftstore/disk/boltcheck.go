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

// checkBolt verifies the pages of a bbolt file before bbolt opens it, and returns the record of the
// stable store.
//
// bbolt has checksums only on its two meta pages. If the newer meta page is damaged, it silently
// uses the older one. It trusts all other pages: a wrong number in a page makes it panic, recurse
// without end, or overwrite pages in use. checkBolt requires that each used page matches its
// parent, is referenced once, and has its keys in order. Damage inside of values is detected by the
// checksums of the values.
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
	if err := c.checkFile(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.record, nil
}

type boltCheck struct {
	f         io.ReaderAt
	size      int64
	pageSize  int64
	pageLimit uint64 // number of pages in use; all page numbers are lower
	seen      map[uint64]struct{}
	record    []byte
}

// ErrDataFormat is returned for a data directory with a format version that this release does not
// read.
var ErrDataFormat = errors.New("raftstore: data directory has a format that this version does not read")

// oldOwnerKey is a key in the stable stores of the first versions, which this release does not
// read.
const oldOwnerKey = "keelson.dev/replica"

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

func (c *boltCheck) corruptError(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrCorruptLog)
}

// visitFunc is called for each element of a leaf page, with the element's flags, key, and value.
type visitFunc func(flags uint32, k, v []byte) error

type boltMeta struct {
	pageSize uint32
	root     uint64
	freelist uint64
	high     uint64
	tx       uint64
}

// readMeta reads meta page n, which is at the given offset in bytes. After a crash it is either the
// old or the new meta page, because its content is in one sector.
func (c *boltCheck) readMeta(n, offset int64) (boltMeta, error) {
	var b [boltPageHead + 64]byte
	if _, err := c.f.ReadAt(b[:], offset); err != nil {
		if errors.Is(err, io.EOF) {
			return boltMeta{}, c.corruptError("file of %d bytes ends before meta page %d", c.size, n)
		}
		return boltMeta{}, err
	}
	m := b[boltPageHead:]
	h := fnv.New64a()
	h.Write(m[:56])
	le := binary.LittleEndian
	if le.Uint64(b[:]) != uint64(n) || le.Uint16(b[8:]) != boltMetaPage ||
		le.Uint32(m) != boltMetaMagic || le.Uint32(m[4:]) != boltMetaVersion || le.Uint64(m[56:]) != h.Sum64() {
		return boltMeta{}, c.corruptError("meta page %d is damaged", n)
	}
	return boltMeta{
		pageSize: le.Uint32(m[8:]), root: le.Uint64(m[16:]), freelist: le.Uint64(m[32:]),
		high: le.Uint64(m[40:]), tx: le.Uint64(m[48:]),
	}, nil
}

func (c *boltCheck) checkFile() error {
	m, err := c.readMeta(0, 0)
	if err != nil {
		return err
	}
	if c.pageSize = int64(m.pageSize); c.pageSize < 1<<10 || c.pageSize > 1<<16 || c.pageSize&(c.pageSize-1) != 0 {
		return c.corruptError("pages of %d bytes", c.pageSize)
	}
	m1, err := c.readMeta(1, c.pageSize)
	if err != nil {
		return err
	}
	if m1.tx > m.tx {
		m, m1 = m1, m
	}
	switch {
	case m.tx != m1.tx+1 || m.pageSize != m1.pageSize:
		return c.corruptError("meta pages have transactions %d and %d", m1.tx, m.tx)
	case m.freelist != boltNoFreelist && m.tx > 1:
		return c.corruptError("unexpected list of free pages on page %d", m.freelist)
	case m.high > uint64(c.size/c.pageSize):
		return c.corruptError("%d bytes where %d pages of %d were written", c.size, m.high, c.pageSize)
	}
	c.pageLimit = m.high
	buckets := 0
	err = c.walkPages(m.root, nil, nil, 0, func(flags uint32, k, v []byte) error {
		buckets++
		if flags != boltBucketFlag || len(v) < boltPageHead {
			return c.corruptError("%q is not a bucket", k)
		}
		switch string(k) {
		case "conf":
			return c.checkStableBucket(v)
		case "logs":
			return c.checkLogBucket(v)
		default:
			return c.corruptError("unexpected bucket %q", k)
		}
	})
	if err == nil && (buckets != 2 || c.record == nil) {
		err = c.corruptError("no record of a replica")
	}
	return err
}

// checkStableBucket verifies the bucket of the stable store. v is the encoded content of the
// bucket. The bucket must contain exactly one record, and must be stored inside of the root page.
func (c *boltCheck) checkStableBucket(v []byte) error {
	if binary.LittleEndian.Uint64(v) != 0 {
		return c.corruptError("the record is not in the root page")
	}
	return c.walkInline(v, func(flags uint32, k, v []byte) error {
		if string(k) == oldOwnerKey || string(k) == "CurrentTerm" {
			return fmt.Errorf("it was created by a version without checksums on votes: %w", ErrDataFormat)
		}
		if flags != 0 || !bytes.Equal(k, keyRecord) {
			return c.corruptError("unexpected key %q in the stable store", k)
		}
		if _, err := decodeRecord(v); err != nil {
			return err
		}
		c.record = bytes.Clone(v)
		return nil
	})
}

// checkLogBucket verifies the bucket of the log. v is the encoded content of the bucket. All its
// keys must be indexes of entries.
func (c *boltCheck) checkLogBucket(v []byte) error {
	entry := func(flags uint32, k, v []byte) error {
		if flags != 0 || len(k) != 8 {
			return c.corruptError("unexpected key %q in the log", k)
		}
		return nil
	}
	if root := binary.LittleEndian.Uint64(v); root != 0 {
		return c.walkPages(root, nil, nil, 0, entry)
	}
	return c.walkInline(v, entry)
}

// walkInline calls visit for each element of an inline bucket: a bucket without pages of its own,
// which is stored in the value v.
func (c *boltCheck) walkInline(v []byte, visit visitFunc) error {
	b := bytes.Clone(v[16:]) // the header of a bucket has 16 bytes
	if len(b) < boltPageHead || binary.LittleEndian.Uint16(b[8:]) != boltLeaf {
		return c.corruptError("a bucket is damaged")
	}
	_, err := c.readElements(b, nil, nil, true, visit)
	return err
}

// walkPages reads page id and the pages below it, and calls visit for each element of the leaf
// pages. All keys must be in the range from lower up to, but not including, upper. If upper is nil,
// the range has no upper bound. depth is the depth of page id in the tree.
func (c *boltCheck) walkPages(id uint64, lower, upper []byte, depth int, visit visitFunc) error {
	b, err := c.readPage(id)
	if err != nil {
		return err
	}
	leaf := binary.LittleEndian.Uint16(b[8:]) == boltLeaf
	children, err := c.readElements(b, lower, upper, leaf, visit)
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	if leaf {
		if len(children) == 0 && depth > 0 {
			return c.corruptError("page %d is empty", id)
		}
		return nil
	}
	if len(children) == 0 || depth == boltDepth {
		return c.corruptError("page %d at depth %d has %d child pages", id, depth, len(children))
	}
	for i, child := range children {
		end := upper
		if i+1 < len(children) {
			end = children[i+1].key
		}
		if err := c.walkPages(child.page, child.key, end, depth+1, visit); err != nil {
			return err
		}
	}
	return nil
}

// readPage returns the content of page id with its overflow pages.
func (c *boltCheck) readPage(id uint64) ([]byte, error) {
	if id < 2 || id >= c.pageLimit {
		return nil, c.corruptError("page %d is out of bounds", id)
	}
	b := make([]byte, c.pageSize)
	if _, err := c.f.ReadAt(b, int64(id)*c.pageSize); err != nil {
		return nil, fmt.Errorf("reading page %d: %w", id, err)
	}
	flags, overflow := binary.LittleEndian.Uint16(b[8:]), uint64(binary.LittleEndian.Uint32(b[12:]))
	if binary.LittleEndian.Uint64(b) != id || flags != boltLeaf && flags != boltBranch || id+overflow >= c.pageLimit {
		return nil, c.corruptError("page %d is damaged", id)
	}
	for i := id; i <= id+overflow; i++ {
		if _, twice := c.seen[i]; twice {
			return nil, c.corruptError("page %d is referenced twice", i)
		}
		c.seen[i] = struct{}{}
	}
	if overflow > 0 {
		b = append(b, make([]byte, int64(overflow)*c.pageSize)...)
		if _, err := c.f.ReadAt(b[c.pageSize:], int64(id+1)*c.pageSize); err != nil {
			return nil, fmt.Errorf("reading page %d: %w", id+1, err)
		}
	}
	return b, nil
}

type boltChild struct {
	key  []byte
	page uint64
}

// readElements decodes the elements of page b. Their keys must be in order, in the range from lower
// up to, but not including, upper, and inside of the page. readElements returns the key of each
// element, with the child page if b is a branch page. For a leaf page it calls visit with each
// element.
func (c *boltCheck) readElements(b []byte, lower, upper []byte, leaf bool, visit visitFunc) ([]boltChild, error) {
	count := int(binary.LittleEndian.Uint16(b[10:]))
	if boltPageHead+count*boltElement > len(b) {
		return nil, c.corruptError("%d elements in %d bytes", count, len(b))
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
		end := start + uint64(ksize) + uint64(vsize)
		if start < uint64(boltPageHead+count*boltElement) || end > uint64(len(b)) || ksize == 0 {
			return nil, c.corruptError("element %d at %d has a key of %d bytes and a value of %d bytes",
				i, start, ksize, vsize)
		}
		k := b[start : start+uint64(ksize)]
		if last != nil && bytes.Compare(k, last) <= 0 || bytes.Compare(k, lower) < 0 ||
			upper != nil && bytes.Compare(k, upper) >= 0 {
			return nil, c.corruptError("key %q of element %d is out of order", k, i)
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
