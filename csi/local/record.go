package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/internal/wholefile"
)

// A volume that was asked for has a record ROOT/.volumes/ID.json, written before anything is made of it and again when all of
// it is there. Its data are in the file ROOT/.images/ID. Behind a PersistentVolume that somebody wrote by hand there was
// no CreateVolume, and no record: such a volume is the folder ROOT/ID, of any size.
const (
	recordsDir = ".volumes"
	imagesDir  = ".images"
)

// record says what a volume is. Fields that a later release adds are ignored.
type record struct {
	Size  int64 `json:"size"`            // bytes
	Ready bool  `json:"ready,omitempty"` // false: it was begun and is to be made anew
	Block bool  `json:"block,omitempty"` // it is a block device, and nothing was made of its content
	Used  bool  `json:"used,omitempty"`  // it was staged once: what it looks like is its users'
}

func (d *Driver) recordFile(id string) string {
	return filepath.Join(d.cfg.Root, recordsDir, id+".json")
}
func (d *Driver) image(id string) string { return filepath.Join(d.cfg.Root, imagesDir, id) }

// volume returns the record of a volume; ok is false where it has none.
func (d *Driver) volume(id string) (r record, ok bool, err error) {
	b, err := os.ReadFile(d.recordFile(id))
	if errors.Is(err, os.ErrNotExist) {
		return record{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return record{}, false, fmt.Errorf("record of volume %s: %w", id, err)
	}
	return r, true, nil
}

func (d *Driver) keep(id string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := wholefile.Write(d.recordFile(id), b); err != nil {
		return fmt.Errorf("record of volume %s: %w", id, err)
	}
	return nil
}

// promised is what all volumes may hold together, in bytes.
func (d *Driver) promised() (int64, error) {
	entries, err := os.ReadDir(filepath.Join(d.cfg.Root, recordsDir))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, e := range entries {
		id, whole := strings.CutSuffix(e.Name(), ".json")
		if !whole {
			continue // half of a record
		}
		r, ok, err := d.volume(id)
		if err != nil {
			return 0, err
		}
		if ok {
			sum += r.Size
		}
	}
	return sum, nil
}
