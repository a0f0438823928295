package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"keelson.dev/keelson/internal/durable"
)

// writeRecord puts on disk what is known of a volume of a pod, before anybody else hears of it: it is there whole or not at all.
func writeRecord(path string, r any) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Write(path, b)
}

// recordsIn reads the records of a folder, by their path. Those that go meanwhile are left out; one that cannot be read is an error,
// since nobody knows what it keeps.
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
