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

// A fence that is longer than the previous one holds once the control plane has it. Before, the control
// plane gives the node's volumes away by the previous fence, and the shorter of the two holds.

// FenceReportAnnotation names the report of the fence that the control plane stored last. An agent chooses
// another name for each report: by that it recognizes a Node that is newer than its report.
const FenceReportAnnotation = "keelson.dev/fence-report"

// keptFenceAnnotation is on a VolumeAttachment: the fence of its Node, which outlives the Node.
const keptFenceAnnotation = "keelson.dev/node-fences-after"

// fenceObjects is the part of the view by which a fence is confirmed.
type fenceObjects interface {
	Confirmed() <-chan struct{}
	Node() (*v1.Node, bool)
	VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool)
}

// reportedFence is the record in the run folder of the shortest fence by which the control plane may go.
// Fields may be added: unknown fields are ignored.
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

// parseFence reads a fence that the control plane stores. One that cannot be read is not a bound.
func parseFence(after string) time.Duration {
	seconds, err := strconv.Atoi(after)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// current returns the fence that holds: the configured one, or a shorter one by which the control plane
// may go; 0 = never.
func (f *fence) current() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return shorterFence(f.after, f.bound)
}

// begin reads the fences that were reported in this boot, and records the shortest. It is called before
// the node reports its fence.
func (f *fence) begin() error {
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
	return f.record(shorterFence(f.after, f.recorded), false)
}

func (f *fence) record(after time.Duration, confirmed bool) error {
	b, err := json.Marshal(reportedFence{Version: reportedFenceVersion, Boot: f.boot, After: after, Confirmed: confirmed})
	if err == nil {
		err = durable.Write(f.reports, b)
	}
	if err != nil {
		return fmt.Errorf("recording the fence that is reported to the control plane (--fence-after): %w", err)
	}
	return nil
}

// unconfirmed returns the name of the report for which the control plane has to confirm the fence; "" where
// it has.
func (f *fence) unconfirmed() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.report
}

// confirm ends the time in which the previous fence holds, once the control plane has the configured one.
func (f *fence) confirm() error {
	report := f.unconfirmed()
	if report == "" {
		return nil
	}
	stored, all, err := f.stored(report)
	if err != nil {
		return err
	}
	if !all {
		f.mu.Lock()
		f.bound = shorterFence(f.recorded, stored)
		f.mu.Unlock()
		return nil
	}
	if err := f.record(f.after, true); err != nil {
		return err
	}
	f.mu.Lock()
	f.bound, f.report = 0, ""
	f.mu.Unlock()
	f.log.Info("the control plane has the fence of the node", "fence-after", f.after)
	return nil
}

// stored returns the shortest fence that the objects of the view have, 0 where none is a bound. all reports
// whether a control plane has the configured one: on the Node, by this report, and on each attachment of a
// volume in use. Attachments of a control plane that keeps no fences have none.
func (f *fence) stored(report string) (shortest time.Duration, all bool, err error) {
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
