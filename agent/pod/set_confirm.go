package pod

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// After a reboot, a pod in the agent's checkpoint may have been replaced on another node. Its Node
// or the pod itself may have been deleted by force, or the node declared out of service. Therefore
// its containers are started only after a control plane has confirmed the assignment. Pods that can
// only be replaced on this node start at once.

// confirmation stores whether a control plane has confirmed which pods are assigned to the node.
type confirmation struct {
	awaited       bool // no control plane has confirmed the assignment since the machine was booted
	loggedWaiting int  // last logged number of pods that wait for the confirmation
	recorded      bool // the confirmation is on disk; used by Set.Run's goroutine only
}

// isBoundToNode reports whether a pod cannot have been replaced on another node: it is a static pod
// or belongs to a DaemonSet.
func isBoundToNode(pod *v1.Pod) bool {
	if _, static := pod.Annotations[v1.MirrorPodAnnotationKey]; static {
		return true
	}
	owner := metav1.GetControllerOf(pod)
	return owner != nil && owner.Kind == "DaemonSet" && strings.HasPrefix(owner.APIVersion, "apps/")
}

// expectConfirmation determines whether pods must wait until a control plane has confirmed the
// assignment. Run calls it before the first decision about a pod.
func (s *Set) expectConfirmation() {
	select {
	case <-s.cfg.Deps.Objects.Confirmed():
		return
	default:
	}
	confirmed, err := podfiles.WasConfirmedInBoot(s.cfg.Paths, s.cfg.Identity.BootID)
	if err != nil {
		s.cfg.Log.Warn(
			"cannot read the record of the confirmed assignment: pods wait for a control plane, as after a reboot",
			"file", podfiles.ConfirmationFile(s.cfg.Paths), "err", err)
	}
	waiting := !s.cfg.StartUnconfirmedPods && !confirmed
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmation.awaited = waiting
}

// acceptConfirmation lets the waiting pods start, and records on disk for later agent processes of
// this boot that the assignment was confirmed.
func (s *Set) acceptConfirmation() {
	s.mu.Lock()
	s.confirmation.awaited = false
	s.mu.Unlock()
	s.recordConfirmation()
}

// recordConfirmation writes the confirmation file, unless it was written before. Without the file,
// the next agent process waits for a control plane.
func (s *Set) recordConfirmation() {
	if s.confirmation.recorded {
		return
	}
	if err := podfiles.SaveConfirmation(s.cfg.Paths, s.cfg.Identity.BootID); err != nil {
		s.cfg.Log.Error("cannot record that the assignment is confirmed: "+
			"an agent that restarts without a control plane does not start pods that have ended", "err", err)
		return
	}
	s.confirmation.recorded = true
}

// awaitsConfirmation reports whether a pod must not be started before a control plane has confirmed
// it. Pods that already ran at the start of the agent need no confirmation. Neither do pods that
// are being deleted, have ended, or cannot run on another node. The lock is held.
func (s *Set) awaitsConfirmation(pod *v1.Pod) bool {
	return s.confirmation.awaited && !s.running[pod.UID] && pod.DeletionTimestamp == nil &&
		!lifecycle.IsTerminal(pod) && !isBoundToNode(pod)
}

// logWaitingPods logs the number of pods that wait for a control plane, if it changed. The lock is
// held.
func (s *Set) logWaitingPods(pods int) {
	if pods != s.confirmation.loggedWaiting {
		s.cfg.Log.Info("pods wait after the boot until a control plane has confirmed their assignment "+
			"(--start-unconfirmed-pods starts them at once)", "pods", pods)
	}
	s.confirmation.loggedWaiting = pods
}
