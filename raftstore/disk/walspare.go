package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// A file is full of zeros before a segment is in it, so that an append has only
// content to bring to the disk. That is done ahead of need, and no faster than
// the log fills the file before it: 16 MiB written at once would make the
// appends of that moment wait. A log that is shortened as much as it grows has
// files that wait (walFiles.spares), and none is made.

// walSpare is the file that is being made; walFiles.mu guards it.
type walSpare struct {
	file    string // "" = none
	at      int64  // how far it is
	hurry   bool   // somebody waits for it
	failed  bool   // the last one could not be made: not tried again before it is needed
	written int64  // of the file that the log is in
	err     error  // of the one made last
}

// walStretch is how much is written before it is brought to the disk.
const walStretch = 256 << 10

// advance notes how far the log is in its file.
func (v *walFiles) advance(written int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := &v.spare
	s.written = written
	if s.file == "" && len(v.spares) == 0 && !s.failed && !v.closed {
		v.makeSpare(v.length)
	}
	if s.file != "" && s.due() >= s.at+walStretch {
		v.moved.Broadcast()
	}
}

// due is how far the file that is being made is to be: a quarter ahead of the log.
func (s *walSpare) due() int64 { return s.written + s.written/4 + walStretch }

// makeSpare begins to make a file; v.mu is held.
func (v *walFiles) makeSpare(length int64) {
	known := v.known()
	for n := 1; v.spare.file == ""; n++ {
		name := fmt.Sprintf("%03d%s", n, walSuffix)
		if _, there := known[name]; !there {
			v.spare = walSpare{file: name, written: v.spare.written}
		}
	}
	file := v.spare.file
	go func() {
		err := v.fill(file, length)
		v.mu.Lock()
		defer v.mu.Unlock()
		v.spare.file, v.spare.err, v.spare.failed = "", err, err != nil
		if err == nil {
			v.spares = append(v.spares, file)
		}
		v.moved.Broadcast()
	}()
}

// awaitSpare waits until there is a file; v.mu is held.
func (v *walFiles) awaitSpare(length int64) error {
	for len(v.spares) == 0 {
		if v.spare.file == "" {
			v.makeSpare(length)
		}
		for v.spare.hurry = true; v.spare.file != ""; {
			v.moved.Broadcast()
			v.moved.Wait()
		}
		if len(v.spares) == 0 {
			return v.spare.err
		}
	}
	return nil
}

// errClosing says that a file is not made because the log is being closed.
var errClosing = errors.New("the log is being closed")

func (v *walFiles) fill(file string, length int64) (err error) {
	path := filepath.Join(v.dir, file)
	tmp := path + platter.NewSuffix
	f, err := v.layer.Open(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return err
	}
	zeros := make([]byte, min(walStretch, length))
	for at := int64(0); at < length && err == nil; {
		var to int64
		to, err = v.awaitDue(at, length)
		for err == nil && at < to {
			part := zeros[:min(int64(len(zeros)), to-at)]
			_, err = f.WriteAt(part, at)
			at += int64(len(part))
		}
		if err == nil {
			err = f.Sync()
		}
	}
	if err == nil {
		_, err = f.WriteAt(walHeader(v.seed(file), v.run, length), 0)
	}
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", path, err), os.Remove(tmp))
	}
	return platter.MoveFile(tmp, path)
}

// awaitDue says up to where the file is to be written next.
func (v *walFiles) awaitDue(at, length int64) (int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.spare.at = at
	to := min(at+walStretch, length)
	for !v.closed && !v.spare.hurry {
		if v.spare.due() >= to {
			return to, nil
		}
		v.moved.Wait()
	}
	if v.spare.hurry {
		return length, nil
	}
	return 0, errClosing
}

func walHeader(seed, run uint32, length int64) []byte {
	var w sectorWriter
	w.put([]byte(walMagic))
	w.put(binary.LittleEndian.AppendUint64(nil, uint64(length)))
	return w.finish(seed, 0, sectorStamp{run: run})
}
