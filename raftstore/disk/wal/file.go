package wal

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

const (
	fileMagic = "keelwal1"
	// pageSize is the unit in which the kernel reads and writes files, in bytes.
	pageSize = 4096
)

// file is the file of one segment. It consists of sectors (package sector). It has its full length
// before the first append, so a shorter file is damaged; the first sector stores the length.
//
// The number of a sector is that of the append that wrote it last. Append numbers rise by one from
// append to append, across all files, and are never reset. The numbers in a file therefore never
// decrease from its start to its end. A sector counts as empty if its number is lower than that of
// an earlier sector, or than the number of the segment's first append. Such a sector is from an
// earlier segment, or from an append that a crash interrupted and a later append replaced. It never
// becomes valid again.
//
// raft-wal appends from one goroutine, and reads from many.
type file struct {
	files *segmentFiles
	f     durable.File
	name  string
	seed  uint32
	from  uint64 // number of the segment's first append; sectors with lower numbers belong to earlier segments
	size  int64

	mu     sync.RWMutex
	live   int64         // index of the last valid sector
	newest uint64        // append number of the last valid sector when the file was opened
	holes  []sectorRange // ranges of empty sectors before the last valid sector
	tail   []byte        // content of the last valid sector, as far as it is filled
	out    sector.Buffer
}

// sectorRange is a range of sector indexes; end is exclusive.
type sectorRange struct{ first, end int64 }

// scan reads every sector of the file. It sets size, live, newest, and holes, and returns an error
// if the file is damaged.
func (w *file) scan() error {
	size, err := w.f.Size()
	if err != nil {
		return err
	}
	w.size, w.newest = size, w.from
	b := make([]byte, 256*sector.Size)
	var length int64
	var last sector.Stamp // stamp of the last valid sector behind a hole
	for at := int64(0); at < size; at += int64(len(b)) {
		b = b[:min(int64(len(b)), size-at)]
		if n, err := w.f.ReadAt(b, at); err != nil && n < len(b) {
			return err
		}
		if at == 0 {
			if length, err = decodeFileHeader(b, w.seed); err != nil {
				return err
			}
			if size < length { // a longer file was growing when the process was killed
				return fmt.Errorf("%d bytes where %d were written: %w", size, length, sector.ErrCorruptLog)
			}
		}
		for from := int64(0); from+sector.Size <= int64(len(b)); from += sector.Size {
			if at+from == 0 {
				continue
			}
			s, state := sector.CheckStamp(b[from:], w.seed, at+from)
			if state == sector.Damaged {
				return fmt.Errorf("sector at %d is damaged: %w", at+from, sector.ErrCorruptLog)
			}
			if state == sector.Empty || s.Number < w.newest {
				continue
			}
			if last, err = w.addSector((at+from)/sector.Size, s, last); err != nil {
				return err
			}
		}
	}
	if length == 0 {
		return fmt.Errorf("the file is empty: %w", sector.ErrCorruptLog)
	}
	return nil
}

// addSector adds the next valid sector of the file to live, newest and holes. index is the sector's
// index and stamp its stamp. afterHole is the result of the previous call, or zero in the first
// call. The result is stamp if a hole has been found, and otherwise afterHole.
//
// A hole is a range of empty sectors before a valid sector. It belongs to an append that a crash
// interrupted, which is the last append of its run (one opening of the log). If two appends of one
// later run follow the hole, the first of them was acknowledged and complete. The hole is then
// damage, and addSector returns an error.
func (w *file) addSector(index int64, stamp, afterHole sector.Stamp) (sector.Stamp, error) {
	if index > w.live+1 {
		w.holes = append(w.holes, sectorRange{w.live + 1, index})
	}
	w.live, w.newest = index, stamp.Number
	if len(w.holes) == 0 {
		return afterHole, nil
	}
	if stamp.Run == afterHole.Run && stamp.Number != afterHole.Number {
		return afterHole, fmt.Errorf("sector at %d is empty, but a later append exists: %w",
			w.holes[0].first*sector.Size, sector.ErrCorruptLog)
	}
	return stamp, nil
}

// decodeFileHeader returns the length of the file in bytes, as stored in its first sector b.
func decodeFileHeader(b []byte, seed uint32) (int64, error) {
	if len(b) < sector.Size {
		return 0, fmt.Errorf("%d bytes: %w", len(b), sector.ErrCorruptLog)
	}
	content := sector.Content(b)
	if _, state := sector.CheckStamp(b, seed, 0); state != sector.Valid || string(content[:8]) != fileMagic {
		return 0, fmt.Errorf("the first sector is damaged: %w", sector.ErrCorruptLog)
	}
	return int64(binary.LittleEndian.Uint64(content[8:])), nil
}

// encodeFileHeader returns the first sector of a file of length bytes.
func encodeFileHeader(seed, run uint32, length int64) []byte {
	var w sector.Buffer
	w.Append([]byte(fileMagic))
	w.Append(binary.LittleEndian.AppendUint64(nil, uint64(length)))
	return w.SealNumbered(seed, 0, sector.Stamp{Run: run})
}

// readBuffers holds reusable buffers for ReadAt: raft-wal reads 64 KiB for every entry.
var readBuffers = sync.Pool{New: func() any { return new([]byte) }}

// ReadAt implements io.ReaderAt. Offsets are those of the content, without the headers of the
// sectors. scan has checked the checksums of the sectors; later damage is detected by the checksum
// of the entry. The last sector may be overwritten concurrently, with the same content followed by
// more content.
func (w *file) ReadAt(p []byte, off int64) (int, error) {
	w.mu.RLock()
	live, holes := w.live, w.holes
	w.mu.RUnlock()
	first := 1 + off/sector.ContentSize
	last := 1 + (off+int64(len(p))-1)/sector.ContentSize
	done := 0
	if have := min(last, live) - first + 1; have > 0 && len(p) > 0 {
		buffer := readBuffers.Get().(*[]byte)
		defer readBuffers.Put(buffer)
		if int64(cap(*buffer)) < have*sector.Size {
			*buffer = make([]byte, have*sector.Size)
		}
		b := (*buffer)[:have*sector.Size]
		if n, err := w.f.ReadAt(b, first*sector.Size); err != nil && n < len(b) {
			return 0, fmt.Errorf("%s: %w", w.name, err)
		}
		for _, h := range holes {
			if from, end := max(h.first, first), min(h.end, first+have); from < end {
				clear(b[(from-first)*sector.Size : (end-first)*sector.Size])
			}
		}
		skip := off % sector.ContentSize
		for i := range have {
			done += copy(p[done:], sector.Content(b[i*sector.Size:])[skip:])
			skip = 0
		}
	}
	if done < len(p) {
		return done, io.EOF
	}
	return done, nil
}

// WriteAt implements io.WriterAt. Offsets are those of the content, without the headers of the
// sectors. Each call is one append. Any content behind p is dropped.
func (w *file) WriteAt(p []byte, off int64) (int, error) {
	first, skip := 1+off/sector.ContentSize, off%sector.ContentSize
	if first > w.live+1 {
		return 0, fmt.Errorf("%s: writing at %d, beyond the end", w.name, off)
	}
	n := sector.CountFor(skip + int64(len(p)))
	if err := w.grow((first + n) * sector.Size); err != nil {
		return 0, err
	}
	if skip > 0 && int64(len(w.tail)) != skip {
		w.tail = make([]byte, skip)
		if _, err := w.ReadAt(w.tail, off-skip); err != nil {
			return 0, err
		}
	}
	w.out.Reset()
	if skip > 0 {
		w.out.Append(w.tail)
	}
	w.out.Append(p)
	stamp := sector.Stamp{Run: w.files.run, Number: w.files.next.Add(1) - 1}
	end := len(w.out.SealUniform(w.seed, first*sector.Size, stamp))
	b := w.out.Extend(w.padding(first*sector.Size + int64(end)))
	if _, err := w.f.WriteAt(b, first*sector.Size); err != nil {
		return 0, fmt.Errorf("%s: %w", w.name, err)
	}
	used := (skip + int64(len(p))) % sector.ContentSize
	w.tail = append(w.tail[:0], sector.Content(b[end-sector.Size:])[:used]...)
	w.out.Reset()
	w.mu.Lock()
	w.live = first + n - 1
	w.holes = cutRanges(w.holes, first)
	w.mu.Unlock()
	w.files.advance((first + n) * sector.Size)
	return len(p), nil
}

// padding returns the number of bytes from the offset end to the end of its page, or to an earlier
// end of the file. Appends are padded to whole pages. Otherwise the kernel would first read a
// partly written page from the disk if it is not in memory. Pages of a reused file need not be.
func (w *file) padding(end int64) int {
	return int(max(0, min((end+pageSize-1)/pageSize*pageSize, w.size)-end))
}

// cutRanges returns the parts of ranges that are before the sector with index end.
func cutRanges(ranges []sectorRange, end int64) []sectorRange {
	var out []sectorRange
	for _, r := range ranges {
		if r.end = min(r.end, end); r.first < r.end {
			out = append(out, r)
		}
	}
	return out
}

// grow extends the file to at least length bytes, before data is written beyond its current end.
// This is necessary when an append is longer than the space behind the segment's limit.
//
// It does not call Stat for the size. After the times of a file are read, Linux gives the file a
// new time with the next write, and ext4 without a journal then writes the inode with every
// fdatasync (50 of 150 µs).
func (w *file) grow(length int64) error {
	if length <= w.size {
		return nil
	}
	length += 64 << 10
	if err := durable.Fill(w.f, w.size, length); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	w.size = length
	if _, err := w.f.WriteAt(encodeFileHeader(w.seed, w.files.run, length), 0); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return w.f.Sync()
}

// Sync implements types.WritableFile.
func (w *file) Sync() error {
	if err := w.f.Sync(); err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	return nil
}

// Close implements io.Closer.
func (w *file) Close() error { return w.f.Close() }
