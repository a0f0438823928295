package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/durable"
)

// recordVersion is the version of the format of records on disk. A later release may add fields,
// but the meaning of a field never changes, and readers ignore unknown fields. An incompatible
// format needs a new version.
const recordVersion = 1

// maxRecord is the maximum size of a record file, in bytes.
const maxRecord = 16 << 20

// namesFile is the name of the file that lists the names of all known resources. The allocations of
// each pod are in a separate file.
const namesFile = "resources.json"

// podRecord stores the devices that are allocated to a pod, by container and resource.
type podRecord struct {
	UID        types.UID                        `json:"uid"`
	Namespace  string                           `json:"namespace"`
	Name       string                           `json:"name"`
	Containers map[string]map[string]allocation `json:"containers"`
}

// allocation is the allocation of one resource to one container.
type allocation struct {
	IDs     []string          `json:"ids"`
	Answer  containerSettings `json:"answer"`
	Prepare bool              `json:"prepare,omitempty"` // call PreStartContainer before each start
}

// recordFile is the JSON content of a record file. Its checksum detects damage.
type recordFile struct {
	Version  int             `json:"version"`
	Checksum string          `json:"checksum"` // SHA-256 of the bytes of content
	Content  json.RawMessage `json:"content"`
}

func saveRecord(file string, content any) error {
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(b)
	if b, err = json.Marshal(recordFile{Version: recordVersion, Checksum: hex.EncodeToString(sum[:]),
		Content: b}); err != nil {
		return err
	}
	if len(b) > maxRecord {
		return fmt.Errorf("%d bytes: %d at most", len(b), maxRecord)
	}
	return durable.WriteIfChanged(file, b, durable.Intact)
}

func readRecord(file string, content any) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err != nil {
		return err
	}
	var e recordFile
	if err := json.Unmarshal(b, &e); err != nil {
		return err
	}
	sum := sha256.Sum256(e.Content)
	switch {
	case e.Version != recordVersion:
		return fmt.Errorf("version %d: this agent supports version %d", e.Version, recordVersion)
	case hex.EncodeToString(sum[:]) != e.Checksum:
		return errors.New("the checksum does not match")
	}
	return json.Unmarshal(e.Content, content)
}

func (m *Manager) recordPath(pod types.UID) string {
	return filepath.Join(m.cfg.State, "pod-"+filepath.Base(string(pod))+".json")
}

// loadRecords loads the allocations and resource names that an earlier agent process stored, unless
// they are loaded. The caller holds the lock.
func (m *Manager) loadRecords() {
	if m.loaded {
		return
	}
	m.loaded = true
	now := time.Now()
	var names []string
	if err := readRecord(filepath.Join(m.cfg.State, namesFile), &names); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.cfg.Log.Error("the recorded resource names of device plugins cannot be read", "err", err)
	}
	files, err := filepath.Glob(filepath.Join(m.cfg.State, "pod-*.json"))
	if err != nil {
		m.cfg.Log.Error("the records of pods' devices cannot be listed", "err", err)
	}
	for _, f := range files {
		uid := types.UID(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "pod-"), ".json"))
		r := &podRecord{}
		if err := readRecord(f, r); err != nil {
			m.cfg.Log.Error("the devices of a pod are unknown: no devices are allocated until the pod is deleted",
				"uid", uid, "file", f, "err", err)
			m.damaged[uid] = fmt.Errorf("record %s: %w", f, err)
			continue
		}
		m.pods[uid] = r
		for _, has := range r.Containers {
			names = append(names, slices.Collect(maps.Keys(has))...)
		}
	}
	for _, n := range names {
		if checkResourceName(n) == nil && len(m.resources) < maxResources {
			m.resources[n] = &devicePool{lostAt: now}
		}
	}
	if len(m.resources) > 0 {
		time.AfterFunc(m.cfg.Grace, m.notifyChange)
	}
}

func (m *Manager) saveNames() error {
	return saveRecord(filepath.Join(m.cfg.State, namesFile), slices.Sorted(maps.Keys(m.resources)))
}

// Pods returns the UIDs of the pods that have devices, including pods with a damaged record. It
// implements agent.Plugins.
func (m *Manager) Pods() ([]types.UID, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	return slices.Concat(slices.Sorted(maps.Keys(m.pods)), slices.Sorted(maps.Keys(m.damaged))), nil
}

// Release releases all devices of a pod and deletes its record. It succeeds if the pod has no
// devices. It implements agent.Plugins.
func (m *Manager) Release(pod types.UID) error {
	defer m.locks.Lock(string(pod))()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	if m.pods[pod] == nil && m.damaged[pod] == nil {
		return nil
	}
	if err := os.Remove(m.recordPath(pod)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("releasing the devices of plugins: %w", err)
	}
	delete(m.pods, pod)
	delete(m.damaged, pod)
	m.notifier.Notify()
	return nil
}
