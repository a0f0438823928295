package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/wholefile"
)

// A volume that was asked for has a record ROOT/.volumes/ID.json, written before anything is made of it and again when all of
// it is there. Its data are in the file ROOT/.images/ID. Behind a PersistentVolume that somebody wrote by hand there was
// no CreateVolume, and no record: such a volume is the folder ROOT/ID, of any size.
// A snapshot is the file ROOT/.snapshots/ID, with a record beside it that is written as a volume's.
const (
	recordsDir   = ".volumes"
	imagesDir    = ".images"
	snapshotsDir = ".snapshots"
)

// record says what a volume is. Fields that a later release adds are ignored.
type record struct {
	Size  int64 `json:"size"`            // bytes
	Ready bool  `json:"ready,omitempty"` // false: it was begun and is to be made anew
	Block bool  `json:"block,omitempty"` // it is a block device, and nothing was made of its content
	Used  bool  `json:"used,omitempty"`  // it was staged once: what it looks like is its users'

	// Of what was made of something else, and of snapshots.
	From       string `json:"from,omitempty"`       // the volume that it is a copy of
	FromRecord string `json:"fromRecord,omitempty"` // the snapshot that it is a copy of
	Shared     bool   `json:"shared,omitempty"`     // it may have blocks in common with what it was copied from
	Made       int64  `json:"made,omitempty"`       // when a snapshot was taken, in nanoseconds of 1970
	Group      string `json:"group,omitempty"`      // the group of snapshots that it is one of
}

func (d *Driver) recordFile(id string) string {
	return filepath.Join(d.cfg.Root, recordsDir, id+".json")
}
func (d *Driver) image(id string) string { return filepath.Join(d.cfg.Root, imagesDir, id) }

// volume returns the record of a volume; ok is false where it has none.
func (d *Driver) volume(id string) (r record, ok bool, err error) {
	if r, ok, err = read(d.recordFile(id)); err != nil {
		return record{}, false, fmt.Errorf("record of volume %s: %w", id, err)
	}
	return r, ok, nil
}

// read reads a record; ok is false where there is none.
func read(path string) (r record, ok bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return record{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	return r, err == nil, err
}

func (d *Driver) keep(id string, r record) error {
	if err := write(d.recordFile(id), r); err != nil {
		return fmt.Errorf("record of volume %s: %w", id, err)
	}
	return nil
}

func write(path string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return wholefile.Write(path, b)
}

// promised is what all volumes and snapshots may hold together, in bytes, and what of it they may share by now: of that
// the disk has not yet taken a block for each, and will.
func (d *Driver) promised() (sum, shared int64, err error) {
	err = d.each(func(_ string, r record) {
		sum += r.Size
		if r.Shared {
			shared += r.Size
		}
	})
	return sum, shared, err
}
