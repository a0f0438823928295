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

// After a reboot a pod of the checkpoint may have been replaced: its Node was deleted, it was deleted by
// force, or its node was declared out of service. So its containers are started only after a control
// plane has confirmed the assignment. Pods whose replacement could only be on this node start at once.

// confirmation is the record in the run folder that a control plane confirmed the assignment during a
// boot of the machine. Fields may be added: unknown fields are ignored.
type confirmation struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`
}

const confirmationVersion = 1

func (c *Config) confirmationFile() string {
	return filepath.Join(c.Paths.Run, "assignment-confirmed.json")
}

// confirmedInBoot reports whether a control plane confirmed the assignment since the machine was booted,
// to this agent or to an earlier one.
func (c *Config) confirmedInBoot() bool {
	var r confirmation
	err := durable.ReadJSON(c.confirmationFile(), &r)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Log.Warn("pods wait for a control plane, as after a reboot: the record of its confirmation is not readable",
			"file", c.confirmationFile(), "err", err)
	}
	return err == nil && r.Boot == c.BootID
}

// localTo reports whether a pod belongs to its node and cannot have been replaced on another node.
func localTo(p *v1.Pod) bool {
	if _, static := p.Annotations[v1.MirrorPodAnnotationKey]; static {
		return true
	}
	owner := metav1.GetControllerOf(p)
	return owner != nil && owner.Kind == "DaemonSet" && strings.HasPrefix(owner.APIVersion, "apps/")
}

// expectConfirmation decides whether pods wait for a control plane. It is called before the first
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

// confirm starts the pods that waited for a control plane, and records the confirmation for the agents
// that follow in this boot.
func (s *Set) confirm() {
	s.mu.Lock()
	s.unconfirmed = false
	s.mu.Unlock()
	s.recordConfirmation()
}

// recordConfirmation writes the record. Without the record the next agent waits for a control plane.
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

// waits reports whether a pod must not be started before a control plane has confirmed it. A pod that
// runs since an earlier agent of this boot goes on, and so does the end of a pod. The lock is held.
func (s *Set) waits(p *v1.Pod) bool {
	return s.unconfirmed && !s.running[p.UID] && p.DeletionTimestamp == nil && !final(p) && !localTo(p)
}

// tellWaiting logs how many pods wait for a control plane. The lock is held.
func (s *Set) tellWaiting(pods int) {
	if pods != s.waiting {
		s.cfg.Log.Info("pods wait until a control plane has confirmed their assignment, since the machine was booted "+
			"(--start-unconfirmed-pods starts them at once)", "pods", pods)
	}
	s.waiting = pods
}
