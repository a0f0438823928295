package podfiles

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/internal/durable"
)

const (
	GrantFile  = "granted.json" // in the pod's directory
	grantLimit = 1 << 20        // largest file that is read, in bytes
)

// LoadGrant reads the grant that an earlier agent process stored for the pod. If there is no file,
// exists is false and the grant equals the spec: older releases stored no grants.
func LoadGrant(paths agent.Paths, pod *v1.Pod) (granted lifecycle.ResourceGrant, exists bool, err error) {
	file := filepath.Join(PodDirectory(paths, pod.UID), GrantFile)
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return lifecycle.GrantFromSpec(pod), false, nil
	}
	if err != nil {
		return lifecycle.GrantFromSpec(pod), false, fmt.Errorf("read the granted resources of pod %s/%s: %w",
			pod.Namespace, pod.Name, err)
	}
	defer f.Close()
	if st, serr := f.Stat(); serr != nil || st.Size() > grantLimit {
		return lifecycle.GrantFromSpec(pod), false, fmt.Errorf("reading %s: more than %d bytes (%v)",
			file, grantLimit, serr)
	}
	if err := json.NewDecoder(f).Decode(&granted); err != nil {
		return lifecycle.GrantFromSpec(pod), false, fmt.Errorf("reading %s: %w", file, err)
	}
	return granted, true, nil
}

// SaveGrant replaces the stored grant atomically.
func SaveGrant(paths agent.Paths, pod *v1.Pod, granted lifecycle.ResourceGrant) error {
	granted.Version = lifecycle.GrantVersion
	data, err := json.Marshal(granted)
	if err != nil {
		return err
	}
	dir := PodDirectory(paths, pod.UID)
	file := filepath.Join(dir, GrantFile)
	if err = os.MkdirAll(dir, 0o750); err == nil {
		err = durable.Write(file, data, durable.Atomic)
	}
	if err != nil {
		return fmt.Errorf("record the granted resources of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}
