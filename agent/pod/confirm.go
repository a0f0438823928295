package pod

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/durable"
)

// After a reboot, a pod in the agent's checkpoint may have been replaced on another node. Its Node
// or the pod itself may have been deleted by force, or the node declared out of service. Therefore
// its containers are started only after a control plane has confirmed the assignment. Pods that can
// only be replaced on this node start at once.

// confirmation is the file in the run directory which records that a control plane confirmed the
// assignment during one boot of the machine. Fields may be added: unknown fields are ignored.
type confirmation struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
}

const confirmationVersion = 1

func (c *Config) confirmationFile() string {
	return filepath.Join(c.Paths.Run, "assignment-confirmed.json")
}

// confirmedInBoot reports whether a control plane has confirmed the assignment since the machine
// was booted, to this agent process or to an earlier one.
func (c *Config) confirmedInBoot() bool {
	var r confirmation
	err := durable.ReadJSON(c.confirmationFile(), &r)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Log.Warn("pods wait for a control plane, as after a reboot: the record of its confirmation is not readable",
			"file", c.confirmationFile(), "err", err)
	}
	return err == nil && r.Boot == c.BootID
}

// localTo reports whether a pod cannot have been replaced on another node: it is a static pod or
// belongs to a DaemonSet.
func localTo(p *v1.Pod) bool {
	if _, static := p.Annotations[v1.MirrorPodAnnotationKey]; static {
		return true
	}
	owner := metav1.GetControllerOf(p)
	return owner != nil && owner.Kind == "DaemonSet" && strings.HasPrefix(owner.APIVersion, "apps/")
}

// expectConfirmation sets whether pods must wait for a control plane. It is called before the first
// decision about a pod.
func (s *Set) expectConfirmation() {
	select {
	case <-s.cfg.Objects.Confirmed():
		return
	default:
	}
	waits := !s.cfg.StartUnconfirmedPods && !s.cfg.confirmedInBoot()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unconfirmed = waits
}

// confirm lets the waiting pods start, and records the confirmation for later agent processes of
// this boot.
func (s *Set) confirm() {
	s.mu.Lock()
	s.unconfirmed = false
	s.mu.Unlock()
	s.recordConfirmation()
}

// recordConfirmation writes the confirmation file once. Without the file, the next agent process
// waits for a control plane.
func (s *Set) recordConfirmation() {
	if s.recorded {
		return
	}
	b, err := json.Marshal(confirmation{Version: confirmationVersion, Boot: s.cfg.BootID})
	if err == nil {
		err = durable.Write(s.cfg.confirmationFile(), b)
	}
	if err != nil {
		s.cfg.Log.Error("an agent that is restarted without a control plane starts no pods that have ended: "+
			"the confirmation of the assignment is not recorded", "err", err)
		return
	}
	s.recorded = true
}

// waits reports whether a pod must not be started before a control plane has confirmed it. Pods
// that already run since an earlier agent process of this boot go on, and pods that are being
// deleted still stop. The lock is held.
func (s *Set) waits(p *v1.Pod) bool {
	return s.unconfirmed && !s.running[p.UID] && p.DeletionTimestamp == nil && !final(p) && !localTo(p)
}

// tellWaiting logs the number of pods that wait for a control plane, if it changed. The lock is
// held.
func (s *Set) tellWaiting(pods int) {
	if pods != s.waiting {
		s.cfg.Log.Info("pods wait until a control plane has confirmed their assignment, since the machine was booted "+
			"(--start-unconfirmed-pods starts them at once)", "pods", pods)
	}
	s.waiting = pods
}
