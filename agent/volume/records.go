package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// writeRecord writes r, the record of a pod's volume, to path atomically. It is called before
// anything is mounted or attached for the volume.
func writeRecord(path string, r any) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.WriteIfChanged(path, b, durable.Intact)
}

// recordsIn returns the records of volumes in the folder dir. The keys are the paths of the
// records. It skips records that are removed meanwhile. An unreadable record is an error, because
// its volume may be mounted. what describes the kind of volume in that error.
func recordsIn[R any](dir, what string) (map[string]R, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]R{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		var r R
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		if err != nil {
			return nil, fmt.Errorf("record of %s %s: %w", what, f, err)
		}
		out[f] = r
	}
	return out, nil
}
