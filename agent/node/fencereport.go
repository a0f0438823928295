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

// A fence that is longer than the previous one takes effect once the control plane has stored it.
// Until then, the control plane detaches the node's volumes by the previous fence, so the shorter
// of the two applies.

// FenceReportAnnotation is the name of the report with the fence. Each agent chooses a new name, so
// it recognizes a Node that was stored after its report.
const FenceReportAnnotation = "keelson.dev/fence-report"

// keptFenceAnnotation is set on a VolumeAttachment: the fence of its Node, which outlives the Node.
const keptFenceAnnotation = "keelson.dev/node-fences-after"

// fenceObjects are the objects that confirm a fence.
type fenceObjects interface {
	Confirmed() <-chan struct{}
	Node() (*v1.Node, bool)
	VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool)
}

// reportedFence is the record in the run folder of the shortest fence that the control plane may
// rely on. Later releases may add fields; unknown fields are ignored.
type reportedFence struct {
	Version   int           `json:"version"`
	Boot      string        `json:"boot"`
	After     time.Duration `json:"after"` // 0 = never
	Confirmed bool          `json:"confirmed"`
}

const reportedFenceVersion = 1

func fenceReportFile(runDir string) string { return filepath.Join(runDir, "fence-reported.json") }

// shorterFence returns the shorter of two fences; 0 = never is the longest.
func shorterFence(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// parseFence parses a fence that the control plane stores. An invalid one is not a bound and
// returns 0.
func parseFence(after string) time.Duration {
	seconds, err := strconv.Atoi(after)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// currentFence returns the effective fence: the configured one, or a shorter one that the control
// plane may rely on; 0 = never.
func (f *fence) currentFence() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return shorterFence(f.after, f.bound)
}

// startReport reads the fences reported since boot, and records the shortest. It is called before
// the node reports its fence.
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
	b, err := json.Marshal(reportedFence{Version: reportedFenceVersion, Boot: f.boot, After: after, Confirmed: confirmed})
	if err == nil {
		err = durable.Write(f.reports, b)
	}
	if err != nil {
		return fmt.Errorf("storing the fence that is reported to the control plane (--fence-after): %w", err)
	}
	return nil
}

// unconfirmedReport returns the name of the report that the control plane has not confirmed, or "".
func (f *fence) unconfirmedReport() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.report
}

// confirmReport makes the configured fence effective once the control plane has stored it.
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

// storedFence returns the shortest fence in the objects of the view; 0 if none is a bound. all
// reports whether a control plane has stored the configured fence: on the Node, with this report,
// and on each attachment of a volume in use. A control plane that does not store fences on
// attachments has none there.
func (f *fence) storedFence(report string) (shortest time.Duration, all bool, err error) {
	select {
	case <-f.objects.Confirmed():
		all = true
	default:
	}
	want := strconv.Itoa(int(f.after / time.Second))
	if n, ok := f.objects.Node(); ok {
		has := n.Annotations[FencesAfterAnnotation]
		shortest = parseFence(has)
		all = all && has == want && n.Annotations[FenceReportAnnotation] == report
	} else {
		all = false
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
			all = all && kept == want
		}
	}
	return shortest, all, nil
}
