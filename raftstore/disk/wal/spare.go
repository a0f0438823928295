package wal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// A file is filled with zeros before it stores a segment, so that the sync of an append writes only
// content. A spare file is filled before it is needed, but not faster than the log fills the
// current file: 16 MiB written at once would delay concurrent appends. A log that is shortened as
// fast as it grows reuses files (segmentFiles.spares), and creates none.

// spareFile is the progress of creating a spare file. segmentFiles.mu guards it.
type spareFile struct {
	name    string // "" if no file is being created
	done    int64  // number of bytes that have been filled
	urgent  bool   // an append waits for the spare file
	failed  bool   // the last creation has failed; the next attempt is made when a spare file is needed
	written int64  // bytes that the log has written to the current segment's file
	err     error  // error of the last creation
}

// fillBytes is how many bytes of a spare file are filled before it is synced.
const fillBytes = 256 << 10

// advance records that the log has written the given number of bytes to the current segment's file.
// It starts or continues the creation of a spare file if this is due.
func (v *segmentFiles) advance(written int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := &v.creating
	s.written = written
	if s.name == "" && len(v.spares) == 0 && !s.failed && !v.closed {
		v.startSpare(v.length)
	}
	if s.name != "" && s.target() >= s.done+fillBytes {
		v.changed.Broadcast()
	}
}

// target returns how many bytes of the spare file should be filled by now: a quarter more than the
// log has written to the current segment's file, plus fillBytes.
func (s *spareFile) target() int64 { return s.written + s.written/4 + fillBytes }

// startSpare starts the creation of a spare file of length bytes in a goroutine. The caller holds
// v.mu.
func (v *segmentFiles) startSpare(length int64) {
	used := v.usedFiles()
	for n := 1; v.creating.name == ""; n++ {
		name := fmt.Sprintf("%03d%s", n, FileSuffix)
		if _, ok := used[name]; !ok {
			v.creating = spareFile{name: name, written: v.creating.written}
		}
	}
	name := v.creating.name
	go func() {
		err := v.createFile(name, length)
		v.mu.Lock()
		defer v.mu.Unlock()
		v.creating.name, v.creating.err, v.creating.failed = "", err, err != nil
		if err == nil {
			v.spares = append(v.spares, name)
		}
		v.changed.Broadcast()
	}()
}

// awaitSpare waits until a spare file exists. If no spare file exists, a file of length bytes is
// created without pauses. The caller holds v.mu.
func (v *segmentFiles) awaitSpare(length int64) error {
	for len(v.spares) == 0 {
		if v.creating.name == "" {
			v.startSpare(length)
		}
		for v.creating.urgent = true; v.creating.name != ""; {
			v.changed.Broadcast()
			v.changed.Wait()
		}
		if len(v.spares) == 0 {
			return v.creating.err
		}
	}
	return nil
}

// errClosing is returned if a spare file is not created because the log is being closed.
var errClosing = errors.New("the log is being closed")

// createFile creates a file of length bytes: a header and zeros. It writes the file in parts, as
// fast as awaitTarget permits.
func (v *segmentFiles) createFile(name string, length int64) (err error) {
	path := filepath.Join(v.dir, name)
	tmp := path + durable.TempSuffix
	f, err := v.fs.Open(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	zeros := make([]byte, min(fillBytes, length))
	for at := int64(0); at < length && err == nil; {
		var end int64
		end, err = v.awaitTarget(at, length)
		for err == nil && at < end {
			part := zeros[:min(int64(len(zeros)), end-at)]
			_, err = f.WriteAt(part, at)
			at += int64(len(part))
		}
		if err == nil {
			err = f.Sync()
		}
	}
	if err == nil {
		_, err = f.WriteAt(encodeFileHeader(FileSeed(v.id, name), v.run, length), 0)
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", path, err), os.Remove(tmp))
	}
	return durable.Rename(tmp, path)
}

// awaitTarget waits until the next part of the spare file should be filled, and returns the offset
// of the part's end. done is the number of bytes that have been filled, and length the size of the
// file. awaitTarget returns errClosing if the log is closed first.
func (v *segmentFiles) awaitTarget(done, length int64) (int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.creating.done = done
	end := min(done+fillBytes, length)
	for !v.closed && !v.creating.urgent {
		if v.creating.target() >= end {
			return end, nil
		}
		v.changed.Wait()
	}
	if v.creating.urgent {
		return length, nil
	}
	return 0, errClosing
}
