package devices

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

// recordVersion is the version of the format of records on disk. A later release may add fields,
// but the meaning of a field never changes, and readers ignore unknown fields. An incompatible
// format needs a new version.
const recordVersion = 1

// maxRecord is the maximum size of a record file, in bytes.
const maxRecord = 16 << 20

// claimRecord is the record on disk of a claim for which DRA drivers have been called on this node.
type claimRecord struct {
	Version   int       `json:"version"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Drivers   []string  `json:"drivers"`
	// the claim's allocated devices, for as long as the record exists
	Allotted []allotment           `json:"allotted,omitempty"`
	Pods     []types.UID           `json:"pods"` // pods on this node that use the claim
	Prepared bool                  `json:"prepared,omitempty"`
	Devices  []agent.ClaimedDevice `json:"devices,omitempty"`
}

func (r *claimRecord) draClaim() *dra.Claim {
	return &dra.Claim{Namespace: r.Namespace, Name: r.Name, Uid: string(r.UID)}
}

// recordStore stores the records of claims in files, one per claim. It is safe for concurrent use;
// the callers serialize the changes of one record.
type recordStore struct {
	dir     string
	log     *slog.Logger
	changed func() // called after a record was written

	mu            sync.Mutex
	loggedDamaged map[types.UID]bool         // damaged records that have been logged
	records       map[types.UID]*claimRecord // the records on disk, loaded on first use; shared: must not be modified
}

func newRecordStore(dir string, log *slog.Logger, changed func()) *recordStore {
	return &recordStore{dir: dir, log: log, changed: changed, loggedDamaged: map[types.UID]bool{}}
}

func (s *recordStore) recordPath(claim types.UID) string {
	return filepath.Join(s.dir, filepath.Base(string(claim))+".json")
}

func (s *recordStore) writeRecord(file string, r *claimRecord) error {
	b, err := json.Marshal(r)
	if err == nil && len(b) > maxRecord {
		err = fmt.Errorf("%d bytes: %d at most", len(b), maxRecord)
	}
	if err == nil {
		err = durable.WriteIfChanged(file, b, durable.Intact)
	}
	if err != nil {
		return fmt.Errorf("recording the devices of resourceclaim %s/%s: %w", r.Namespace, r.Name, err)
	}
	s.mu.Lock()
	if s.records != nil {
		now := *r
		now.Pods = slices.Clone(r.Pods)
		s.records[r.UID] = &now
	}
	s.mu.Unlock()
	s.changed()
	return nil
}

func (s *recordStore) removeRecord(claim types.UID) error {
	if err := os.Remove(s.recordPath(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.mu.Lock()
	delete(s.records, claim)
	s.mu.Unlock()
	return nil
}

// preparedRecords returns the records of a pod's prepared claims, by claim name.
func (s *recordStore) preparedRecords(pod types.UID) map[string]*claimRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records == nil {
		all, _, err := s.scanRecords()
		if err != nil {
			return nil
		}
		s.records = map[types.UID]*claimRecord{}
		for _, r := range all {
			s.records[r.UID] = r
		}
	}
	out := map[string]*claimRecord{}
	for _, r := range s.records {
		if r.Prepared && slices.Contains(r.Pods, pod) {
			out[r.Name] = r
		}
	}
	return out
}

// readRecord reads the record of a claim from disk, or returns nil if the claim has no record. If
// the record cannot be used, the error wraps agent.ErrDamagedRecord.
func (s *recordStore) readRecord(claim types.UID) (*claimRecord, error) {
	file := s.recordPath(claim)
	r, err := readFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err == nil && r.Version != recordVersion:
		err = fmt.Errorf("version %d: this agent supports version %d", r.Version, recordVersion)
	case err == nil && r.UID != claim:
		err = fmt.Errorf("it contains uid %q", truncateText(string(r.UID)))
	}
	if err != nil {
		return nil,
			fmt.Errorf("%w: %s: the pods and prepared devices of the resourceclaim with uid %s are unknown (%w): "+
				"make sure that its drivers release the devices, for example by a restart of the node, "+
				"then remove the "+
				"file", agent.ErrDamagedRecord, file, claim, err)
	}
	return r, nil
}

func readFile(name string) (*claimRecord, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return nil, err
	}
	var r claimRecord
	return &r, json.Unmarshal(b, &r)
}

// readAllRecords returns the records of all claims. damaged contains the errors of unreadable
// records by claim; they are also logged.
func (s *recordStore) readAllRecords() (records []*claimRecord, damaged map[types.UID]error, err error) {
	if records, damaged, err = s.scanRecords(); err == nil {
		s.logDamaged(damaged)
	}
	return records, damaged, err
}

func (s *recordStore) scanRecords() (all []*claimRecord, damaged map[types.UID]error, err error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return nil, nil, err
	}
	damaged = map[types.UID]error{}
	for _, f := range files {
		claim := types.UID(strings.TrimSuffix(filepath.Base(f), ".json"))
		switch r, err := s.readRecord(claim); {
		case err != nil:
			damaged[claim] = err
		case r != nil:
			all = append(all, r)
		}
	}
	return all, damaged, nil
}

// logDamaged logs the error of each damaged record, once per record.
func (s *recordStore) logDamaged(damaged map[types.UID]error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.loggedDamaged, func(claim types.UID, _ bool) bool { return damaged[claim] == nil })
	for claim, why := range damaged {
		if !s.loggedDamaged[claim] {
			s.loggedDamaged[claim] = true
			s.log.Error("pods that may use a claim cannot be removed, because its record is damaged", "err", why)
		}
	}
}

// mayConcern reports whether the pod may use the claim, which has a damaged record. It returns true
// if the claims of the pod are unknown, as for a pod of an earlier agent process.
func (d *Devices) mayConcern(claim types.UID, pod *v1.Pod) bool {
	if len(pod.Spec.Containers) == 0 {
		return true
	}
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return true
		}
		if name == nil {
			continue
		}
		if c, ok := d.cfg.Objects.ResourceClaim(pod.Namespace, *name); !ok || c.UID == claim {
			return true
		}
	}
	return false
}

// Pods returns the UIDs of the pods that may have prepared devices. It implements agent.Devices.
func (d *Devices) Pods() ([]types.UID, error) {
	all, _, err := d.records.readAllRecords()
	if err != nil {
		return nil, err
	}
	pods := map[types.UID]bool{}
	for _, r := range all {
		for _, p := range r.Pods {
			pods[p] = true
		}
	}
	return slices.Sorted(maps.Keys(pods)), nil
}
