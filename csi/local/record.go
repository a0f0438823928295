package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// A volume that was asked for has a record ROOT/.volumes/ID.json, written before anything is made of it and again when all of
// it is there. Its data are in the file ROOT/.images/ID. Behind a PersistentVolume that somebody wrote by hand there was
// no CreateVolume, and no record: such a volume is the folder ROOT/ID, of any size.
// What is different for folders of a size stands in directory.go.
// A snapshot is the file ROOT/.snapshots/ID, with a record beside it that is written as a volume's.
const (
	recordsDir   = ".volumes"
	imagesDir    = ".images"
	snapshotsDir = ".snapshots"
)

// recordVersion is that of records which say more than that a volume is an image: those of folders. A record of a higher one
// is not understood, and its volume left alone.
const recordVersion = 1

// errLater says of a record that it is not understood. What it promises and which project id it has is read all the same.
var errLater = errors.New("written by a later release")

// record says what a volume is. Fields that a later release adds are ignored.
type record struct {
	Version int   `json:"version,omitempty"` // 0: of an image
	Size    int64 `json:"size"`              // bytes
	Ready   bool  `json:"ready,omitempty"`   // false: it was begun and is to be made anew
	Block   bool  `json:"block,omitempty"`   // it is a block device, and nothing was made of its content
	Used    bool  `json:"used,omitempty"`    // it was staged once: what it looks like is its users'

	// Of folders.
	Backing string `json:"backing,omitempty"` // "" = image
	Project uint32 `json:"project,omitempty"` // what its quota is of

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
	if err == nil && r.Version > recordVersion {
		return r, true, fmt.Errorf("%s is of version %d, %w: this one reads versions up to %d", path, r.Version, errLater, recordVersion)
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
	return durable.Write(path, b)
}

// promised is what all volumes and snapshots may hold together, in bytes, and what of it the disk has not yet taken a block
// for, and will: of images that may share blocks with others, and of folders what is not in them yet.
func (d *Driver) promised() (sum, open int64, err error) {
	shares := d.quotas.shares(d.cfg.Root)
	err = d.each(func(_ string, r record) {
		sum += r.Size
		switch {
		case r.Shared || r.Version > recordVersion:
			open += r.Size
		case r.Backing == backingDirectory:
			open += r.Size
			if u, err := d.quotas.used(d.cfg.Root, r.Project); err == nil && !shares {
				open -= min(r.Size, u.bytes)
			}
		}
	})
	if err != nil {
		return 0, 0, err
	}
	deleted, err := d.deleted()
	for _, p := range deleted { // until it is gone it has its place
		if u, err := d.quotas.used(d.cfg.Root, p); err == nil {
			sum += u.bytes
		}
	}
	return sum, open, err
}
