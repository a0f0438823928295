package statefulset

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/controllers/podtest"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func statefulSet(n int32, change ...func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
	l := map[string]string{"app": "db"}
	s := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "db", UID: "set", Generation: 3},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: l}, ServiceName: "db",
			Template:            corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}},
			PodManagementPolicy: appsv1.OrderedReadyPodManagement,
			UpdateStrategy: appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{Partition: new(int32)}},
		},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func parallel(s *appsv1.StatefulSet) { s.Spec.PodManagementPolicy = appsv1.ParallelPodManagement }
func onDelete(s *appsv1.StatefulSet) {
	s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType}
}
func minReady(s *appsv1.StatefulSet) { s.Spec.MinReadySeconds = 30 }
func startAt(n int32) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) { s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: n} }
}
func partitioned(n int32) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) { s.Spec.UpdateStrategy.RollingUpdate.Partition = &n }
}
func unavailable(v intstr.IntOrString) func(*appsv1.StatefulSet) {
	return func(s *appsv1.StatefulSet) { s.Spec.UpdateStrategy.RollingUpdate.MaxUnavailable = &v }
}

// members parses pods such as "0:old 1:new,starting 2:new,going": an ordinal, a revision and a
// state. The default state is ready.
func members(set *appsv1.StatefulSet, list string) (pods []*corev1.Pod) {
	for _, f := range strings.Fields(list) {
		var ordinal int
		number, rest, _ := strings.Cut(f, ":")
		_, _ = fmt.Sscan(number, &ordinal)
		revision, state, _ := strings.Cut(rest, ",")
		p := newPod(set, &set.Spec.Template, revision, ordinal)
		p.UID = types.UID(p.Name)
		podtest.SetState(p, state, epoch)
		switch state {
		case "going":
			p.Status.Conditions = podtest.Ready(epoch.Add(-time.Hour))
		case "bare":
			p.Labels = map[string]string{"app": "db", appsv1.ControllerRevisionHashLabelKey: revision}
		}
		pods = append(pods, p)
	}
	return pods
}

func snapshotOf(set *appsv1.StatefulSet, pods []*corev1.Pod) Snapshot {
	return Snapshot{Set: set, Pods: pods, Going: func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil
	}, Current: "old", Update: "new", Now: epoch}
}

// words is a step as text: "create 1(old) replace db-0 delete db-2 label db-1".
func words(step Step) string {
	var out []string
	for _, c := range step.Create {
		w := fmt.Sprint("create ", c.Ordinal)
		if c.Current {
			w += "(old)"
		}
		out = append(out, w)
	}
	for _, l := range []struct {
		verb string
		pods []*corev1.Pod
	}{{"replace", step.Replace}, {"delete", step.Delete}, {"label", step.Label}} {
		for _, p := range l.pods {
			out = append(out, l.verb+" "+p.Name)
		}
	}
	if step.Again > 0 {
		out = append(out, "again "+step.Again.String())
	}
	return strings.Join(out, ", ")
}

func TestPlan(t *testing.T) {
	for name, c := range map[string]struct {
		set  *appsv1.StatefulSet
		pods string
		want string
	}{
		"the first comes first":             {statefulSet(3), "", "create 0"},
		"the next waits for it":             {statefulSet(3), "0:new,starting", ""},
		"the next":                          {statefulSet(3), "0:new", "create 1"},
		"a gap is filled first":             {statefulSet(3), "0:new 2:new", "create 1"},
		"all at once":                       {statefulSet(3, parallel), "1:new,starting", "create 0, create 2"},
		"from another ordinal":              {statefulSet(2, startAt(5)), "0:new 5:new", "create 6"},
		"what is below the first goes":      {statefulSet(1, startAt(5)), "0:new 5:new", "delete db-0"},
		"too short ready":                   {statefulSet(2, minReady), "0:new,fresh", "again 20s"},
		"an ended one is replaced":          {statefulSet(2), "0:new,failed 1:new", "replace db-0"},
		"a going one is waited for":         {statefulSet(2), "0:new,going 1:new", ""},
		"and not in parallel":               {statefulSet(3, parallel), "0:new,going 1:new", "create 2"},
		"the highest goes first":            {statefulSet(1), "0:new 1:new 2:new", "delete db-2"},
		"one after the other":               {statefulSet(1), "0:new 1:new 2:new,going", ""},
		"none goes while one is not well":   {statefulSet(1), "0:new,starting 1:new 2:new", ""},
		"the highest may be the unwell one": {statefulSet(1), "0:new 1:new 2:new,starting", "delete db-2"},
		"it waits for one below":            {statefulSet(1), "0:new 1:new,starting 2:new,starting", ""},
		"all that are too many": {statefulSet(1, parallel), "0:new 1:new,starting 2:new",
			"delete db-2, delete db-1"},
		"an update begins at the top": {statefulSet(3), "0:old 1:old 2:old", "delete db-2"},
		"and goes down":               {statefulSet(3), "0:old 1:old 2:new", "delete db-1"},
		"when the higher one is well": {statefulSet(3), "0:old 1:old 2:new,starting", ""},
		"the partition stays":         {statefulSet(3, partitioned(2)), "0:old 1:old 2:new", ""},
		"and is made of the old":      {statefulSet(3, partitioned(2)), "0:old 2:new", "create 1(old)"},
		"above it of the new":         {statefulSet(3, partitioned(1)), "0:old 2:new", "create 1"},
		"partition above all":         {statefulSet(2, partitioned(9)), "0:old 1:old", ""},
		"on delete":                   {statefulSet(2, onDelete), "0:old 1:old", ""},
		"on delete made of the new":   {statefulSet(2, onDelete), "0:old", "create 1"},
		"two at a time": {statefulSet(4, unavailable(intstr.FromInt32(2))),
			"0:old 1:old 2:old 3:old", "delete db-3, delete db-2"},
		"half at a time": {statefulSet(4, parallel, unavailable(intstr.FromString("50%"))),
			"0:old 1:old 2:old 3:new,starting", "delete db-2"},
		"a share of less than one is one": {statefulSet(4, unavailable(intstr.FromString("10%"))),
			"0:old 1:old 2:old 3:old", "delete db-3"},
		"what is broken already costs none":  {statefulSet(3, parallel), "0:old,starting 1:old 2:new", "delete db-0"},
		"a broken new one stops the rest":    {statefulSet(3, parallel), "0:old 1:old 2:new,starting", ""},
		"labels come back":                   {statefulSet(1), "0:new,bare", "label db-0"},
		"update and label":                   {statefulSet(1), "0:old,bare", "delete db-0, label db-0"},
		"a condemned pod may be ended":       {statefulSet(0), "0:new,failed", "delete db-0"},
		"update waits for ready long enough": {statefulSet(2, minReady), "0:old 1:new,fresh", "again 20s"},
	} {
		if got := words(PlanStatefulSet(snapshotOf(c.set, members(c.set, c.pods)))); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	set := statefulSet(3)
	at := metav1.NewTime(epoch)
	set.DeletionTimestamp = &at
	if got := words(PlanStatefulSet(snapshotOf(set, nil))); got != "" {
		t.Errorf("a set that goes: %s", got)
	}
}

func TestStatus(t *testing.T) {
	set := statefulSet(3, minReady)
	s, again := Status(snapshotOf(set, members(set, "0:old 1:new,fresh 2:new,starting 3:new,going")), nil)
	if got := fmt.Sprintf("%d %d %d %d %d %s %s %d", s.Replicas, s.ReadyReplicas, s.AvailableReplicas,
		s.CurrentReplicas, s.UpdatedReplicas, s.CurrentRevision, s.UpdateRevision, s.ObservedGeneration); got !=
		"4 2 1 1 2 old new 3" || again != 20*time.Second {
		t.Errorf("%s, again in %v", got, again)
	}
	set = statefulSet(2)
	s, _ = Status(snapshotOf(set, members(set, "0:new 1:new")), nil)
	if s.CurrentRevision != "new" || s.CurrentReplicas != 2 {
		t.Errorf("a rollout that is done: %+v", s)
	}
	set = statefulSet(2, onDelete)
	if s, _ = Status(snapshotOf(set, members(set, "0:new 1:new")), nil); s.CurrentRevision != "old" {
		t.Errorf("on delete: %+v", s)
	}
}

func TestNames(t *testing.T) {
	set := statefulSet(1)
	for name, want := range map[string]int{"db-0": 0, "db-10": 10, "db-01": -1, "db--1": -1, "db-": -1, "db-x": -1,
		"other-0": -1, "db-1-2": -1, "db-99999999999999999999": -1} {
		n, ok := ordinalOf(set, name)
		if !ok {
			n = -1
		}
		if n != want {
			t.Errorf("%s has ordinal %d, want %d", name, n, want)
		}
	}
}

// A set whose plan is performed step by step, while pods start, fail and disappear, never violates
// its invariants and reaches its desired state.
func TestPlanConverges(t *testing.T) {
	for seed := range uint64(400) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		n := int32(rnd.IntN(6))
		set := statefulSet(n, partitioned(int32(rnd.IntN(3))), unavailable(intstr.FromInt32(1+int32(rnd.IntN(3)))))
		if rnd.IntN(2) == 0 {
			parallel(set)
		}
		if rnd.IntN(3) == 0 {
			startAt(int32(rnd.IntN(4)))(set)
		}
		var start []string
		for i := range rnd.IntN(8) {
			start = append(start, fmt.Sprintf("%d:old", i))
		}
		pods := members(set, strings.Join(start, " "))
		for step := 0; ; step++ {
			if step == 300 {
				t.Fatalf("seed %d: not done after 300 steps: %s", seed, show(pods))
			}
			s := snapshotOf(set, pods)
			plan := PlanStatefulSet(s)
			promises(t, seed, s, plan)
			quiet := words(plan) == ""
			pods = carryOut(set, pods, plan, rnd)
			fails, moved := 15, false
			if step >= 40 {
				fails = 0
			}
			if pods, moved = podtest.Live(pods, epoch, rnd, fails); quiet && !moved && step >= 40 {
				break
			}
		}
		finished(t, seed, set, pods)
	}
}

func show(pods []*corev1.Pod) string {
	var out []string
	for _, p := range pods {
		out = append(out, fmt.Sprintf("%s:%s,%s,going=%v", p.Name, revisionOf(p), p.Status.Phase,
			p.DeletionTimestamp != nil))
	}
	return strings.Join(out, " ")
}

// promises checks the invariants of every single step.
func promises(t *testing.T, seed uint64, s Snapshot, plan Step) {
	t.Helper()
	wanted, _ := s.partitionPods()
	away := 0
	for _, st := range wanted {
		if st == nil || !st.available {
			away++
		}
	}
	ordered := s.Set.Spec.PodManagementPolicy == appsv1.OrderedReadyPodManagement
	if ordered && len(plan.Create)+len(plan.Replace) > 1 {
		t.Fatalf("seed %d: %s at once", seed, words(plan))
	}
	for _, c := range plan.Create {
		for i, st := range wanted[:c.Ordinal-firstOrdinal(s.Set)] {
			if ordered && (st == nil || !st.available) {
				t.Fatalf("seed %d: %d is made before %d is available", seed, c.Ordinal, firstOrdinal(s.Set)+i)
			}
		}
	}
	for _, p := range plan.Delete {
		n, _ := ordinalOf(s.Set, p.Name)
		place := n - firstOrdinal(s.Set)
		if place < 0 || place >= len(wanted) {
			continue
		}
		if place < updatePartition(s.Set) || revisionOf(p) == s.Update {
			t.Fatalf("seed %d: %s of revision %s is deleted below the partition or up to date", seed,
				p.Name, revisionOf(p))
		}
		if wanted[place].available {
			away++
		}
	}
	if len(plan.Delete) > 0 && ordered && away > max(maxUnavailable(s.Set), 1) {
		t.Fatalf("seed %d: %d are away at once: %s", seed, away, words(plan))
	}
}

func carryOut(set *appsv1.StatefulSet, pods []*corev1.Pod, plan Step, rnd *rand.Rand) []*corev1.Pod {
	for _, c := range plan.Create {
		revision := "new"
		if c.Current {
			revision = "old"
		}
		if rnd.IntN(4) > 0 { // some calls fail
			pods = append(pods, members(set, fmt.Sprintf("%d:%s,starting", c.Ordinal, revision))...)
		}
	}
	at := metav1.NewTime(epoch)
	for _, list := range [][]*corev1.Pod{plan.Delete, plan.Replace} {
		for _, p := range list {
			p.DeletionTimestamp = &at
		}
	}
	return pods
}

func finished(t *testing.T, seed uint64, set *appsv1.StatefulSet, pods []*corev1.Pod) {
	t.Helper()
	if len(pods) != replicasOrDefault(set) {
		t.Fatalf("seed %d: %d pods of %d: %s", seed, len(pods), replicasOrDefault(set), show(pods))
	}
	for _, p := range pods {
		n, _ := ordinalOf(set, p.Name)
		if place := n - firstOrdinal(set); place >= updatePartition(set) && revisionOf(p) != "new" {
			t.Fatalf("seed %d: %s is of revision %s", seed, p.Name, revisionOf(p))
		}
	}
}
