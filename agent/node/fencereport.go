package node

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

// A configured fence time that is longer than the previous one takes effect only when the control
// plane has stored it. Until then, the control plane may detach the node's volumes after the
// previous time, so the shorter time applies.

// FenceReportAnnotation is an annotation of the Node with a name for the agent's report of its
// fence time. Each agent process chooses a new name. If the stored Node has this name, the control
// plane has stored this report.
const FenceReportAnnotation = "keelson.dev/fence-report"

// keptFenceAnnotation is an annotation of a VolumeAttachment with the fence time of its Node in
// seconds. It remains after the Node is deleted.
const keptFenceAnnotation = "keelson.dev/node-fences-after"

// fenceObjects is the part of the node's view of the cluster that shows which fence time the
// control plane has stored.
type fenceObjects interface {
	Confirmed() <-chan struct{}
	Node() (*v1.Node, bool)
	VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool)
}

// reportedFence is the JSON record, in the run folder, of the shortest fence time that the control
// plane may rely on. Later releases may add fields; unknown fields are ignored.
type reportedFence struct {
	Version   int           `json:"version"`
	Boot      string        `json:"boot"`
	After     time.Duration `json:"after"` // 0 = never
	Confirmed bool          `json:"confirmed"`
}

const reportedFenceVersion = 1

func fenceReportFile(runDir string) string { return filepath.Join(runDir, "fence-reported.json") }

// shorterFence returns the shorter of two fence times. 0 means never and is the longest.
func shorterFence(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// parseFence parses a fence time in seconds as stored by the control plane. For an invalid text it
// returns 0, which means never.
func parseFence(after string) time.Duration {
	seconds, err := strconv.Atoi(after)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// currentFence returns the effective fence time: the configured one, or a shorter one that the
// control plane may still rely on. 0 means never.
func (f *fence) currentFence() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return shorterFence(f.after, f.bound)
}

// startReport starts the report of the configured fence time to the control plane, under a new
// name. It loads the shortest fence time that was reported since boot, and records the shorter of
// both on disk. It must be called before the node reports its fence time.
func (f *fence) startReport() error {
	var r reportedFence
	err := durable.ReadJSON(f.reports, &r)
	known := err == nil && r.Boot == f.boot
	if known && r.Confirmed && r.After == f.after {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		known = false
	}
	f.mu.Lock()
	if known {
		f.recorded = r.After
	}
	f.bound, f.report = f.recorded, rand.Text()
	f.mu.Unlock()
	return f.recordFence(shorterFence(f.after, f.recorded), false)
}

func (f *fence) recordFence(after time.Duration, confirmed bool) error {
	b, err := json.Marshal(reportedFence{Version: reportedFenceVersion, Boot: f.boot, After: after,
		Confirmed: confirmed})
	if err == nil {
		err = durable.WriteIfChanged(f.reports, b, durable.Intact)
	}
	if err != nil {
		return fmt.Errorf("storing the fence that is reported to the control plane (--fence-after): %w", err)
	}
	return nil
}

// unconfirmedReport returns the name of the fence report that the control plane has not confirmed,
// or "" if no report is pending.
func (f *fence) unconfirmedReport() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.report
}

// confirmReport checks whether the control plane has stored the configured fence time. If so, the
// configured fence time becomes effective.
func (f *fence) confirmReport() error {
	report := f.unconfirmedReport()
	if report == "" {
		return nil
	}
	stored, all, err := f.storedFence(report)
	if err != nil {
		return err
	}
	if !all {
		f.mu.Lock()
		f.bound = shorterFence(f.recorded, stored)
		f.mu.Unlock()
		return nil
	}
	if err := f.recordFence(f.after, true); err != nil {
		return err
	}
	f.mu.Lock()
	f.bound, f.report = 0, ""
	f.mu.Unlock()
	f.log.Info("the control plane has stored the fence of this node", "fence-after", f.after)
	return nil
}

// storedFence returns the shortest fence time in the objects of the node's view, or 0 if no object
// has a fence time. everywhere reports whether the control plane has stored the configured time in
// all of them. It must be on the Node, together with the name of this report. It must also be on
// each VolumeAttachment of a volume in use that has a fence time; a control plane of an earlier
// release stores no fence times on VolumeAttachments.
func (f *fence) storedFence(report string) (shortest time.Duration, everywhere bool, err error) {
	select {
	case <-f.objects.Confirmed():
		everywhere = true
	default:
	}
	want := strconv.Itoa(int(f.after / time.Second))
	if n, ok := f.objects.Node(); ok {
		has := n.Annotations[FencesAfterAnnotation]
		shortest = parseFence(has)
		everywhere = everywhere && has == want && n.Annotations[FenceReportAnnotation] == report
	} else {
		everywhere = false
	}
	names, _, err := f.volumes.VolumesInUse()
	if err != nil {
		return 0, false, err
	}
	for _, name := range names {
		driver, handle, _ := agent.ParseAttachedName(name)
		a, ok := f.objects.VolumeAttachment(driver, handle)
		if !ok {
			continue
		}
		if kept, keeps := a.Annotations[keptFenceAnnotation]; keeps {
			shortest = shorterFence(shortest, parseFence(kept))
			everywhere = everywhere && kept == want
		}
	}
	return shortest, everywhere, nil
}
