package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The names under which tools look for the parts of a cluster. The members of the raft group are what etcd's are.
const (
	controllersComponent = "controller-manager"
	schedulerComponent   = "scheduler"
	memberComponent      = "etcd-%d"
	schedulerPart        = "scheduler" // in leaderParts
)

// components is what the cluster knows of its parts now. The leader and the other members are asked, for statusTimeout
// at most.
func (r *Replica) components(ctx context.Context) []corev1.ComponentStatus {
	return componentsOf(r.clusterStatus(ctx, false))
}

// componentsOf reads a status as Kubernetes tells of components, in the order of their names: the controllers, a
// member after the other, the scheduler.
func componentsOf(s api.ClusterStatus) []corev1.ComponentStatus {
	var scheduling, controlling []string
	for _, p := range s.Failing {
		text := fmt.Sprintf("%s failed and is begun again: %s", p.Name, p.Error)
		if p.Name == schedulerPart {
			scheduling = append(scheduling, text)
		} else {
			controlling = append(controlling, text)
		}
	}
	leading := func(name string, faults []string) corev1.ComponentStatus {
		switch {
		case s.Leader == "":
			return component(name, corev1.ConditionFalse, "", "no replica leads")
		case s.Work == "":
			return component(name, corev1.ConditionUnknown, "", fmt.Sprintf("the leader, replica %s, does not say how its work goes%s", s.Leader, silence(s)))
		case s.Work == api.WorkWaiting:
			return component(name, corev1.ConditionFalse, "", fmt.Sprintf("replica %s leads and has not begun its work yet", s.Leader))
		case len(faults) > 0:
			return component(name, corev1.ConditionFalse, "", strings.Join(faults, "; "))
		}
		return component(name, corev1.ConditionTrue, "ok", "")
	}
	out := []corev1.ComponentStatus{leading(controllersComponent, controlling)}
	members := slices.SortedFunc(slices.Values(s.Members), func(a, b api.ClusterMember) int { return cmp.Compare(a.Name, b.Name) })
	for i, m := range members {
		out = append(out, memberStatus(fmt.Sprintf(memberComponent, i), m, s.Leader))
	}
	return append(out, leading(schedulerComponent, scheduling))
}

// silence says why the leader tells nothing, as far as that is known.
func silence(s api.ClusterStatus) string {
	for _, m := range s.Members {
		if why, not := strings.CutPrefix(m.Ready, "no: "); not && m.Name == s.Leader {
			return ": " + why
		}
	}
	return ""
}

func memberStatus(name string, m api.ClusterMember, leader string) corev1.ComponentStatus {
	who := "replica " + m.Name
	switch {
	case m.Ready != "yes":
		return component(name, corev1.ConditionFalse, "", fmt.Sprintf("%s is not ready: %s", who, strings.TrimPrefix(m.Ready, "no: ")))
	case leader == "":
		return component(name, corev1.ConditionFalse, "", who+" knows of no leader")
	case m.Standby:
		return component(name, corev1.ConditionTrue, "ok: "+who+" is a standby without a vote", "")
	case !m.Voter:
		return component(name, corev1.ConditionTrue, "ok: "+who+" is catching up and has no vote yet", "")
	case m.Leader:
		return component(name, corev1.ConditionTrue, "ok: "+who+" leads", "")
	}
	return component(name, corev1.ConditionTrue, "ok: "+who+" follows", "")
}

func component(name string, healthy corev1.ConditionStatus, message, fault string) corev1.ComponentStatus {
	return corev1.ComponentStatus{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Conditions: []corev1.ComponentCondition{{
			Type: corev1.ComponentHealthy, Status: healthy, Message: message, Error: fault,
		}},
	}
}
