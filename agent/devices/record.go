package devices

import (
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

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

// recordVersion is the version of the format of records on disk. New fields get new names and never
// change their meaning; readers ignore unknown fields.
const recordVersion = 1

// maxRecord is the maximum size of a record file, in bytes.
const maxRecord = 16 << 20

// claimRecord is the record on disk of a claim for which drivers have been called.
type claimRecord struct {
	Version   int                   `json:"version"`
	Namespace string                `json:"namespace"`
	Name      string                `json:"name"`
	UID       types.UID             `json:"uid"`
	Drivers   []string              `json:"drivers"`
	Allotted  []allotment           `json:"allotted,omitempty"` // the claim's devices, for as long as the record exists
	Pods      []types.UID           `json:"pods"`               // pods on this node that use the claim
	Prepared  bool                  `json:"prepared,omitempty"`
	Devices   []agent.ClaimedDevice `json:"devices,omitempty"`
}

func (r *claimRecord) draClaim() *dra.Claim {
	return &dra.Claim{Namespace: r.Namespace, Name: r.Name, Uid: string(r.UID)}
}

func (d *Devices) recordPath(claim types.UID) string {
	return filepath.Join(d.cfg.State, filepath.Base(string(claim))+".json")
}

func (d *Devices) writeRecord(file string, r *claimRecord) error {
	b, err := json.Marshal(r)
	if err == nil && len(b) > maxRecord {
		err = fmt.Errorf("%d bytes: %d at most", len(b), maxRecord)
	}
	if err == nil {
		err = durable.Write(file, b)
	}
	if err != nil {
		return fmt.Errorf("recording the devices of resourceclaim %s/%s: %w", r.Namespace, r.Name, err)
	}
	d.mu.Lock()
	if d.records != nil {
		now := *r
		now.Pods = slices.Clone(r.Pods)
		d.records[r.UID] = &now
	}
	d.mu.Unlock()
	d.notifier.Notify()
	return nil
}

func (d *Devices) removeRecord(claim types.UID) error {
	if err := os.Remove(d.recordPath(claim)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.mu.Lock()
	delete(d.records, claim)
	d.mu.Unlock()
	return nil
}

// preparedRecords returns the records of a pod's prepared claims, by claim name.
func (d *Devices) preparedRecords(pod types.UID) map[string]*claimRecord {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.records == nil {
		all, _, err := d.scanRecords()
		if err != nil {
			return nil
		}
		d.records = map[types.UID]*claimRecord{}
		for _, r := range all {
			d.records[r.UID] = r
		}
	}
	out := map[string]*claimRecord{}
	for _, r := range d.records {
		if r.Prepared && slices.Contains(r.Pods, pod) {
			out[r.Name] = r
		}
	}
	return out
}

// readRecord reads the record of a claim from disk, or returns nil if none exists. If the record
// cannot be used, the error wraps agent.ErrDamagedRecord.
func (d *Devices) readRecord(claim types.UID) (*claimRecord, error) {
	file := d.recordPath(claim)
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
		return nil, fmt.Errorf("%w: %s: the pods and prepared devices of the resourceclaim with uid %s are unknown (%w): "+
			"make sure that its drivers release the devices, for example by a restart of the node, then remove the file", agent.ErrDamagedRecord, file, claim, err)
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
func (d *Devices) readAllRecords() (all []*claimRecord, damaged map[types.UID]error, err error) {
	if all, damaged, err = d.scanRecords(); err == nil {
		d.logDamaged(damaged)
	}
	return all, damaged, err
}

func (d *Devices) scanRecords() (all []*claimRecord, damaged map[types.UID]error, err error) {
	files, err := filepath.Glob(filepath.Join(d.cfg.State, "*.json"))
	if err != nil {
		return nil, nil, err
	}
	damaged = map[types.UID]error{}
	for _, f := range files {
		claim := types.UID(strings.TrimSuffix(filepath.Base(f), ".json"))
		switch r, err := d.readRecord(claim); {
		case err != nil:
			damaged[claim] = err
		case r != nil:
			all = append(all, r)
		}
	}
	return all, damaged, nil
}

// logDamaged logs the error of each damaged record, once per record.
func (d *Devices) logDamaged(damaged map[types.UID]error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.loggedDamaged, func(claim types.UID, _ bool) bool { return damaged[claim] == nil })
	for claim, why := range damaged {
		if !d.loggedDamaged[claim] {
			d.loggedDamaged[claim] = true
			d.cfg.Log.Error("pods that may use a claim cannot be removed, because its record is damaged", "err", why)
		}
	}
}

// mayConcern reports whether the pod may use the claim, which has a damaged record. For a pod of an
// earlier agent process, the pod's claims are unknown, and it returns true.
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
	all, _, err := d.readAllRecords()
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
