package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"keelson.dev/keelson/controlplane/api"
)

// The feature level of a cluster says in which forms its replicas may write what they store. A release reads every form
// up to its own level; a form is written only once every replica has said that it reads it. The level lies in the store,
// so that a backup carries it; the leader raises it, and nobody lowers it.
//
//	0  what was stored before there were levels
//	1  managedFields in form 1 (registry/fieldform.go)
//	2  exchanges of keys (keyrotation/rotation): a release that does not know how one kind is exchanged would go by the former key
const (
	FeatureLevel     = 2 // the highest that this release understands
	LevelShortFields = 1
	LevelRotation    = 2
)

const (
	// LevelKey is the key of the store at which the LevelRecord lies.
	LevelKey    = api.StorageRoot + "keelson.dev/feature-level"
	maxLevelDoc = 4 << 10 // bytes of the stored record
)

// LevelRecord is what lies in the store, and beside it in LevelFile. Later releases may add fields: unknown ones are
// ignored, and what Level says is the same in every version.
type LevelRecord struct {
	Version int    `json:"version"`
	Level   uint32 `json:"level"`
	Release string `json:"release,omitempty"` // that raised it, for a person
}

const LevelRecordVersion = 1

func DecodeLevel(raw []byte) (LevelRecord, error) {
	var rec LevelRecord
	if len(raw) > maxLevelDoc {
		return rec, fmt.Errorf("the stored feature level (%s): a record of %d bytes", LevelKey, len(raw))
	}
	if err := json.Unmarshal(raw, &rec); err != nil {
		return rec, fmt.Errorf("the stored feature level (%s): %w", LevelKey, err)
	}
	return rec, nil
}

// ErrLevelTooHigh says that this release must not work on what is stored.
var ErrLevelTooHigh = errors.New("this release is too old for what is stored")

// CheckUnderstood refuses what a release that understands levels up to own cannot read.
func (rec LevelRecord) CheckUnderstood(own uint32) error {
	if rec.Level <= own {
		return nil
	}
	by := ""
	if rec.Release != "" {
		by = ", raised by release " + rec.Release
	}
	return fmt.Errorf("%w: the cluster stores forms of feature level %d%s, and this release understands levels up to %d: "+
		"start the release that the other replicas run, or one after it", ErrLevelTooHigh, rec.Level, by, own)
}

// SaveLevel writes a level down beside the store, where a release that does not understand it finds it before it
// touches the store.
func SaveLevel(folder string, rec LevelRecord) error {
	if err := WriteJSON(filepath.Join(folder, LevelFile), rec); err != nil {
		return fmt.Errorf("keeping the feature level: %w", err)
	}
	return nil
}

// CheckLevel refuses a data folder whose store this release does not understand.
func (d Dir) CheckLevel() error {
	var rec LevelRecord
	if _, err := ReadJSON(filepath.Join(d.Path, LevelFile), &rec); err != nil {
		return err
	}
	return rec.CheckUnderstood(d.FeatureLevel)
}
