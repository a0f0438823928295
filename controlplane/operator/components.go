package operator

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The names of ComponentStatuses that tools expect. The members of the raft cluster are named like
// etcd members.
const (
	controllersComponent = "controller-manager"
	schedulerComponent   = "scheduler"
	memberComponent      = "etcd-%d"
)

// SchedulerPart is the name of the scheduler among the parts of the leader's work (LeaderWork).
const SchedulerPart = "scheduler"

// componentStatuses returns the ComponentStatuses of a cluster, sorted by name: controllers,
// members, scheduler.
func componentStatuses(s api.ClusterStatus) []corev1.ComponentStatus {
	var schedulerFaults, controllerFaults []string
	for _, p := range s.Failing {
		text := fmt.Sprintf("%s failed and is restarted: %s", p.Name, p.Error)
		if p.Name == SchedulerPart {
			schedulerFaults = append(schedulerFaults, text)
		} else {
			controllerFaults = append(controllerFaults, text)
		}
	}
	components := []corev1.ComponentStatus{leaderComponent(controllersComponent, s, controllerFaults)}
	members := slices.SortedFunc(slices.Values(s.Members), func(a, b api.ClusterMember) int {
		return cmp.Compare(a.Name, b.Name)
	})
	for i, m := range members {
		components = append(components, memberStatus(fmt.Sprintf(memberComponent, i), m, s.Leader))
	}
	return append(components, leaderComponent(schedulerComponent, s, schedulerFaults))
}

// leaderComponent returns the status of a component that runs on the leader. It is healthy if the
// leader has started its work and faults is empty.
func leaderComponent(name string, s api.ClusterStatus, faults []string) corev1.ComponentStatus {
	switch {
	case s.Leader == "":
		return newComponent(name, corev1.ConditionFalse, "", "no replica leads")
	case s.Work == "":
		return newComponent(name, corev1.ConditionUnknown, "",
			fmt.Sprintf("the leader, replica %s, does not report its work%s", s.Leader, leaderProblem(s)))
	case s.Work == api.WorkWaiting:
		return newComponent(name, corev1.ConditionFalse, "",
			fmt.Sprintf("replica %s leads and has not started its work yet", s.Leader))
	case len(faults) > 0:
		return newComponent(name, corev1.ConditionFalse, "", strings.Join(faults, "; "))
	}
	return newComponent(name, corev1.ConditionTrue, "ok", "")
}

// leaderProblem returns ": " and the reason why the leader is not ready, or "" if no reason is
// known.
func leaderProblem(s api.ClusterStatus) string {
	for _, m := range s.Members {
		if reason, notReady := strings.CutPrefix(m.Ready, "no: "); notReady && m.Name == s.Leader {
			return ": " + reason
		}
	}
	return ""
}

func memberStatus(name string, m api.ClusterMember, leader string) corev1.ComponentStatus {
	member := "replica " + m.Name
	switch {
	case m.Ready != "yes":
		return newComponent(name, corev1.ConditionFalse, "",
			fmt.Sprintf("%s is not ready: %s", member, strings.TrimPrefix(m.Ready, "no: ")))
	case leader == "":
		return newComponent(name, corev1.ConditionFalse, "", member+" has no leader")
	case m.Standby:
		return newComponent(name, corev1.ConditionTrue, "ok: "+member+" is a standby without a vote", "")
	case !m.Voter:
		return newComponent(name, corev1.ConditionTrue, "ok: "+member+" is catching up and has no vote yet", "")
	case m.Leader:
		return newComponent(name, corev1.ConditionTrue, "ok: "+member+" leads", "")
	}
	return newComponent(name, corev1.ConditionTrue, "ok: "+member+" follows", "")
}

func newComponent(name string, healthy corev1.ConditionStatus, message, fault string) corev1.ComponentStatus {
	return corev1.ComponentStatus{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Conditions: []corev1.ComponentCondition{{
			Type: corev1.ComponentHealthy, Status: healthy, Message: message, Error: fault,
		}},
	}
}
