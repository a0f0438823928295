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

// eviction is the content of the file in a pod's directory that records the reason of its eviction.
// Fields may be added, but no field may change its meaning.
type eviction struct {
	Version   int    `json:"version"`
	Reason    string `json:"reason"`
	Message   string `json:"message"`
	Disrupted bool   `json:"disrupted,omitempty"`
}

// SaveEviction writes the eviction of the pod durably.
func SaveEviction(paths agent.Paths, pod *v1.Pod, stop lifecycle.Stop) error {
	dir := PodDirectory(paths, pod.UID)
	data, err := json.Marshal(eviction{Version: evictionVersion, Reason: stop.Reason, Message: stop.Message,
		Disrupted: stop.Disrupted})
	if err == nil {
		err = durable.WriteIfChanged(filepath.Join(dir, EvictionFile), data, durable.Persistent)
	}
	if err != nil {
		return fmt.Errorf("record the eviction of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// LoadEviction returns the eviction of the pod by an earlier agent process; nil if the pod was not
// evicted. The grace period of the returned Stop is zero.
func LoadEviction(paths agent.Paths, pod *v1.Pod) (*lifecycle.Stop, error) {
	file := filepath.Join(PodDirectory(paths, pod.UID), EvictionFile)
	st, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var data []byte
	if err == nil && st.Size() > evictionLimit {
		err = fmt.Errorf("%s has more than %d bytes", file, evictionLimit)
	}
	if err == nil {
		data, err = os.ReadFile(file)
	}
	var saved eviction
	if err == nil {
		err = json.Unmarshal(data, &saved)
	}
	if err != nil {
		return nil, fmt.Errorf("read the eviction record of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return &lifecycle.Stop{Reason: saved.Reason, Message: saved.Message, Disrupted: saved.Disrupted,
		Recorded: true}, nil
}

const (
	evictionVersion = 1
	EvictionFile    = "evicted.json" // in the pod's directory
	evictionLimit   = 1 << 20        // largest file that is read, in bytes
)
