package disk

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/hashicorp/go-hclog"

	"keelson.dev/keelson/raftstore/disk/platter"
)

const (
	walMagic = "keelwal1"
	// walPage is what the kernel reads and writes at once.
	walPage = 4096
)

// walFile is the file of one segment, made of sectors (sector.go). It has its
// whole length before it takes a byte, so that a shorter one is a damaged one;
// the first sector tells the length.
//
// The number of a sector is that of the append that wrote it last: they rise by
// one from append to append, through all files and for ever. So, from the
// beginning of a file on, numbers never fall, and a sector whose number is
// lower than one before it, or than the number with which the segment began, is
// empty: of an earlier segment, or a piece of an append that a crash cut short
// and a later one took the place of. Such pieces never come back.
//
// raft-wal appends only, from one goroutine, and reads what it has appended
// from many.
type walFile struct {
	files *walFiles
	f     platter.File
	name  string
	seed  uint32
	from  uint64 // the number with which the segment began
	size  int64

	mu     sync.RWMutex
	live   int64      // sectors that count
	newest uint64     // number of the last of them, as found
	holes  []walRange // empty sectors among them
	tail   []byte
	out    []byte
}

// walRange is sectors from first on, without end.
type walRange struct{ first, end int64 }

// scan reads every sector of the file.
func (w *walFile) scan() error {
	size, err := w.f.Size()
	if err != nil {
		return err
	}
	w.size, w.newest = size, w.from
	b := make([]byte, 256*sectorBytes)
	var length int64
	var last sectorStamp // behind a hole
	for at := int64(0); at < size; at += int64(len(b)) {
		b = b[:min(int64(len(b)), size-at)]
		if n, err := w.f.ReadAt(b, at); err != nil && n < len(b) {
			return err
		}
		if at == 0 {
			if length, err = readWALHeader(b, w.seed); err != nil {
				return err
			}
			if size < length { // longer: growing was cut short
				return fmt.Errorf("%d bytes where %d were written: %w", size, length, ErrCorruptLog)
			}
		}
		for from := int64(0); from+sectorBytes <= int64(len(b)); from += sectorBytes {
			if at+from == 0 {
				continue
			}
			s, kind := readSector(b[from:], w.seed, at+from)
			if kind == sectorBad {
				return fmt.Errorf("sector at %d is damaged: %w", at+from, ErrCorruptLog)
			}
			if kind == sectorEmpty || s.number < w.newest {
				continue
			}
			if last, err = w.found((at+from)/sectorBytes, s, last); err != nil {
				return err
			}
		}
	}
	if length == 0 {
		return fmt.Errorf("the file is empty: %w", ErrCorruptLog)
	}
	return nil
}

// found takes in a sector that counts. Empty ones before it are of an append
// that was cut short, the last of its opening of the log: two appends of one
// opening behind them say that the first was acknowledged, and had been whole.
func (w *walFile) found(sector int64, s, last sectorStamp) (sectorStamp, error) {
	if sector > w.live+1 {
		w.holes = append(w.holes, walRange{w.live + 1, sector})
	}
	w.live, w.newest = sector, s.number
	if len(w.holes) == 0 {
		return last, nil
	}
	if s.run == last.run && s.number != last.number {
		return last, fmt.Errorf("sector at %d is empty, what was appended after it is there: %w", w.holes[0].first*sectorBytes, ErrCorruptLog)
	}
	return s, nil
}

func readWALHeader(b []byte, seed uint32) (int64, error) {
	if len(b) < sectorBytes {
		return 0, fmt.Errorf("%d bytes: %w", len(b), ErrCorruptLog)
	}
	if _, kind := readSector(b, seed, 0); kind != sectorGood || string(b[sectorHead:sectorHead+8]) != walMagic {
		return 0, fmt.Errorf("the first sector is damaged: %w", ErrCorruptLog)
	}
	return int64(binary.LittleEndian.Uint64(b[sectorHead+8:])), nil
}

// sectorBuffers are for reading; raft-wal reads 64 KiB for every entry.
var sectorBuffers = sync.Pool{New: func() any { return new([]byte) }}

// ReadAt implements io.ReaderAt, over the content of the sectors. scan has
// checked them; what has gone bad since is found by the checksum of the entry.
// The last sector may be written anew meanwhile, with more behind what is read.
func (w *walFile) ReadAt(p []byte, off int64) (int, error) {
	w.mu.RLock()
	live, holes := w.live, w.holes
	w.mu.RUnlock()
	first := 1 + off/sectorRoom
	last := 1 + (off+int64(len(p))-1)/sectorRoom
	done := 0
	if have := min(last, live) - first + 1; have > 0 && len(p) > 0 {
		buffer := sectorBuffers.Get().(*[]byte)
		defer sectorBuffers.Put(buffer)
		if int64(cap(*buffer)) < have*sectorBytes {
			*buffer = make([]byte, have*sectorBytes)
		}
		b := (*buffer)[:have*sectorBytes]
		if n, err := w.f.ReadAt(b, first*sectorBytes); err != nil && n < len(b) {
			return 0, fmt.Errorf("%s: %w", w.name, err)
		}
		for _, h := range holes {
			if from, end := max(h.first, first), min(h.end, first+have); from < end {
				clear(b[(from-first)*sectorBytes : (end-first)*sectorBytes])
			}
		}
		skip := off % sectorRoom
		for i := range have {
			from := i * sectorBytes
			done += copy(p[done:], b[from+sectorHead+skip:from+sectorBytes])
			skip = 0
		}
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// WriteAt implements io.WriterAt: it ends the file where p ends.
func (w *walFile) WriteAt(p []byte, off int64) (int, error) {
	first, skip := 1+off/sectorRoom, off%sectorRoom
	if first > w.live+1 {
		return 0, fmt.Errorf("%s: writing at %d, beyond the end", w.name, off)
	}
	n := sectorsFor(skip + int64(len(p)))
	if err := w.grow((first + n) * sectorBytes); err != nil {
		return 0, err
	}
	if skip > 0 && int64(len(w.tail)) != skip {
		w.tail = make([]byte, skip)
		if _, err := w.ReadAt(w.tail, off-skip); err != nil {
			return 0, err
		}
	}
	out := sectorWriter{buf: w.out[:0]}
	if skip > 0 {
		out.put(w.tail)
	}
	out.put(p)
	clear(out.buf[out.end:])
	stamp := sectorStamp{w.files.run, w.files.next.Add(1) - 1}
	for from := int64(0); from < int64(len(out.buf)); from += sectorBytes {
		sealSector(out.buf[from:], w.seed, first*sectorBytes+from, stamp)
	}
	end := int64(len(out.buf))
	whole := w.wholePages(out.buf, first*sectorBytes)
	if _, err := w.f.WriteAt(whole, first*sectorBytes); err != nil {
		return 0, fmt.Errorf("%s: %w", w.name, err)
	}
	used := (skip + int64(len(p))) % sectorRoom
	w.tail = append(w.tail[:0], out.buf[end-sectorBytes+sectorHead:][:used]...)
	if w.out = whole; cap(w.out) > 2<<20 {
		w.out = nil
	}
	w.mu.Lock()
	w.live = first + n - 1
	w.holes = cutRanges(w.holes, first)
	w.mu.Unlock()
	w.files.advance((first + n) * sectorBytes)
	return len(p), nil
}

// wholePages adds zeros up to the end of a page, as far as the file goes. Of a
// page that is written in part the kernel would read the rest from the disk
// before: the file of an earlier segment need not be in memory.
func (w *walFile) wholePages(b []byte, at int64) []byte {
	end := at + int64(len(b))
	more := min((end+walPage-1)/walPage*walPage, w.size) - end
	if more <= 0 {
		return b
	}
	n := len(b)
	b = slices.Grow(b, int(more))[:n+int(more)]
	clear(b[n:])
	return b
}

// cutRanges are those parts of ranges that lie before a sector.
func cutRanges(ranges []walRange, sector int64) []walRange {
	var out []walRange
	for _, r := range ranges {
		if r.end = min(r.end, sector); r.first < r.end {
			out = append(out, r)
		}
	}
	return out
}

// grow makes the file longer, before anything is written there. It happens
// when an append is longer than the slack. It must not ask for the size of the
// file: Linux gives a file whose times were looked at a new time with the next
// write, however soon that is, and ext4 without a journal brings the inode to the
// disk with every fdatasync that finds it changed (50 µs of 150).
func (w *walFile) grow(to int64) error {
	if to <= w.size {
		return nil
	}
	to += 64 << 10
	if err := platter.Fill(w.f, w.size, to); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	w.size = to
	if _, err := w.f.WriteAt(walHeader(w.seed, w.files.run, to), 0); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return w.f.Sync()
}

// Sync implements types.WritableFile.
func (w *walFile) Sync() error {
	if err := w.f.Sync(); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return nil
}

// Close implements io.Closer.
func (w *walFile) Close() error { return w.f.Close() }

// quietLogger drops what raft-wal says: what matters comes as an error.
func quietLogger() hclog.Logger { return hclog.NewNullLogger() }
