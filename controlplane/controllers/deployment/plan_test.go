package deployment

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// deploy is a Deployment of n replicas with image "v<version>".
func deploy(n int32, version int, surge, unavailable string) *appsv1.Deployment {
	s, u := intstr.Parse(surge), intstr.Parse(unavailable)
	deadline, history := int32(600), int32(10)
	l := map[string]string{"app": "web"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "d", Generation: 1},
		Spec: appsv1.DeploymentSpec{
			Replicas: &n, ProgressDeadlineSeconds: &deadline, RevisionHistoryLimit: &history,
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &s, MaxUnavailable: &u}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: fmt.Sprint("v", version)}}}},
		},
	}
}

// set returns the ReplicaSet of a version in the form that this controller creates: spec replicas,
// counted pods, available pods.
func set(d *appsv1.Deployment, version int, spec, pods, available int32) *appsv1.ReplicaSet {
	of := d.DeepCopy()
	of.Spec.Template.Spec.Containers[0].Image = fmt.Sprint("v", version)
	rs := newSet(of, nil, spec)
	rs.Name, rs.Generation = fmt.Sprint("v", version), 1
	rs.CreationTimestamp = metav1.NewTime(epoch.Add(time.Duration(version) * time.Minute))
	rs.Annotations[RevisionAnnotation] = fmt.Sprint(version)
	rs.Status = appsv1.ReplicaSetStatus{Replicas: pods, ReadyReplicas: available, AvailableReplicas: available,
		ObservedGeneration: 1}
	return rs
}

// show writes a step in one line.
func show(s Step) string {
	var parts []string
	if s.Create != nil {
		parts = append(parts, fmt.Sprintf("create %d", *s.Create.Spec.Replicas))
	}
	for _, u := range s.Update {
		parts = append(parts, fmt.Sprintf("%s %d->%d", u.Set.Name, u.Was, *u.Set.Spec.Replicas))
	}
	for _, rs := range s.Delete {
		parts = append(parts, "delete "+rs.Name)
	}
	return strings.Join(parts, ", ")
}

// F59 F61 F67 F69
func TestPlan(t *testing.T) {
	type world struct {
		d    *appsv1.Deployment
		sets []*appsv1.ReplicaSet
	}
	rolling := func(n int32, surge, unavailable string, sets ...[4]int32) world {
		d := deploy(n, 9, surge, unavailable)
		w := world{d: d}
		for _, s := range sets {
			w.sets = append(w.sets, set(d, int(s[0]), s[1], s[2], s[3]))
		}
		return w
	}
	with := func(w world, change func(w world)) world { change(w); return w }
	recreate := func(w world) {
		w.d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}
	}
	for _, c := range []struct {
		name  string
		world world
		alive bool
		want  string
	}{
		{"first: all at once", rolling(3, "25%", "25%"), false, "create 3"},
		{"nothing to do", rolling(3, "1", "0", [4]int32{9, 3, 3, 3}), false, ""},
		{"a new template starts with the surge", rolling(10, "3", "2", [4]int32{1, 10, 10, 10}), false, "create 3"},
		{"no surge: nothing new before something old went", rolling(4, "0", "1", [4]int32{1, 4, 4, 4}),
			false, "create 0"},
		{"then the old shrink by what may be unavailable",
			rolling(10, "3", "2", [4]int32{1, 10, 10, 10}, [4]int32{9, 3, 3, 0}), false, "v1 10->8"},
		{"room made is used", rolling(10, "3", "2", [4]int32{1, 8, 8, 8}, [4]int32{9, 3, 3, 0}), false, "v9 3->5"},
		{"old pods that are still there take room", rolling(10, "3", "2", [4]int32{1, 8, 10, 10}, [4]int32{9, 3, 3, 0}),
			false, ""},
		{"available new ones let old ones go", rolling(10, "3", "2", [4]int32{1, 8, 8, 8}, [4]int32{9, 5, 5, 3}),
			false, "v1 8->5"},
		{"broken old pods go first", rolling(4, "1", "1", [4]int32{1, 2, 2, 0}, [4]int32{2, 2, 2, 2},
			[4]int32{9, 1, 1, 0}), false, "v1 2->1"},
		{"the oldest shrink first", rolling(4, "1", "1", [4]int32{1, 2, 2, 2}, [4]int32{2, 2, 2, 2},
			[4]int32{9, 1, 1, 1}), false, "v1 2->0"},
		{"too many of the current are removed", with(rolling(3, "1", "0", [4]int32{9, 5, 5, 5}), func(w world) {
			w.sets[0].Annotations[DesiredReplicasAnnotation] = "3"
		}), false, "v9 5->3"},
		{"the annotation shows a scaling, which is not a rollout",
			with(rolling(5, "1", "0", [4]int32{1, 3, 3, 3}), func(w world) {
				w.sets[0].Annotations[DesiredReplicasAnnotation] = "3"
			}), false, "v1 3->5"},
		{"paused: no new template", with(rolling(3, "1", "0", [4]int32{1, 3, 3, 3}), func(w world) {
			w.d.Spec.Paused = true
		}), false, ""},
		{"a size that was not counted yet is waited for",
			with(rolling(10, "3", "2", [4]int32{1, 8, 8, 8}, [4]int32{9, 3, 3, 0}), func(w world) {
				w.sets[0].Generation = 2
			}), false, ""},
		{"recreate: first the old go", with(rolling(3, "1", "0", [4]int32{1, 3, 3, 3}), recreate), true, "v1 3->0"},
		{"recreate: then it waits", with(rolling(3, "1", "0", [4]int32{1, 0, 0, 0}), recreate), true, ""},
		{"recreate: then the new come", with(rolling(3, "1", "0", [4]int32{1, 0, 0, 0}), recreate), false, "create 3"},
		{"a deleted one does nothing", with(rolling(3, "1", "0"), func(w world) {
			w.d.DeletionTimestamp = &metav1.Time{Time: epoch}
		}), false, ""},
		{"history beyond the limit goes, lowest revision first",
			with(rolling(1, "1", "0", [4]int32{1, 0, 0, 0}, [4]int32{2, 0, 0, 0}, [4]int32{3, 0, 0, 0},
				[4]int32{9, 1, 1, 1}), func(w world) {
				one := int32(1)
				w.d.Spec.RevisionHistoryLimit = &one
				w.d.Status = appsv1.DeploymentStatus{Replicas: 1, UpdatedReplicas: 1, AvailableReplicas: 1,
					ObservedGeneration: 1}
			}), false, "delete v1, delete v2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			step, err := PlanDeployment(Snapshot{Deployment: c.world.d, Sets: c.world.sets,
				OldPodsAlive: func([]*appsv1.ReplicaSet) (bool, error) { return c.alive, nil }})
			if err != nil {
				t.Fatal(err)
			}
			if got := show(step); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// The documented example: 10 replicas in a rollout as 8 and 5, scaled to 15, become 11 and 7.
func TestScalingInProportion(t *testing.T) {
	for _, c := range []struct {
		name     string
		to       int32
		old, cur int32
		want     string
	}{
		{"growing", 15, 8, 5, "v1 8->11, v9 5->7"},
		{"shrinking", 5, 8, 5, "v1 8->5, v9 5->3"},
		{"to nothing", 0, 8, 5, "v1 8->0, v9 5->0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := deploy(10, 9, "3", "2")
			sets := []*appsv1.ReplicaSet{set(d, 1, c.old, c.old, c.old), set(d, 9, c.cur, c.cur, 0)}
			d.Spec.Replicas = &c.to
			step, err := PlanDeployment(Snapshot{Deployment: d, Sets: sets})
			if err != nil {
				t.Fatal(err)
			}
			if got := show(step); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			for _, u := range step.Update {
				if u.Set.Annotations[DesiredReplicasAnnotation] != fmt.Sprint(c.to) {
					t.Errorf("%s is annotated for %s replicas", u.Set.Name,
						u.Set.Annotations[DesiredReplicasAnnotation])
				}
			}
		})
	}
}

// F67: a rollback takes the old replica set again, under a new revision.
func TestRevisions(t *testing.T) {
	d := deploy(3, 1, "1", "0")
	d.Annotations = map[string]string{"note": "x", corev1.LastAppliedConfigAnnotation: "{}", RevisionAnnotation: "2"}
	sets := []*appsv1.ReplicaSet{set(d, 1, 0, 0, 0), set(d, 2, 3, 3, 3)}
	step, err := PlanDeployment(Snapshot{Deployment: d, Sets: sets})
	if err != nil {
		t.Fatal(err)
	}
	if got := show(step); got != "v1 0->1" || step.Revision != 3 {
		t.Fatalf("got %q, revision %d", got, step.Revision)
	}
	a := step.Update[0].Set.Annotations
	if a[RevisionAnnotation] != "3" || a[RevisionHistoryAnnotation] != "1" || a["note"] != "x" ||
		a[corev1.LastAppliedConfigAnnotation] != "" {
		t.Errorf("annotations %v", a)
	}
}

func TestTemplateHash(t *testing.T) {
	a, b := deploy(1, 1, "1", "0"), deploy(5, 1, "2", "0")
	one := int32(1)
	hash := TemplateHash(&a.Spec.Template, nil)
	if hash != TemplateHash(&b.Spec.Template, nil) {
		t.Error("equal templates have different hashes")
	}
	if hash == TemplateHash(&a.Spec.Template, &one) {
		t.Error("a collision is not escaped")
	}
	if hash == TemplateHash(&deploy(1, 2, "1", "0").Spec.Template, nil) {
		t.Error("different templates have one hash")
	}
	rs := newSet(a, nil, 1)
	if rs.Name != "web-"+hash || rs.Labels[appsv1.DefaultDeploymentUniqueLabelKey] != hash ||
		rs.Spec.Selector.MatchLabels[appsv1.DefaultDeploymentUniqueLabelKey] != hash ||
		rs.Spec.Template.Labels[appsv1.DefaultDeploymentUniqueLabelKey] != hash {
		t.Errorf("replica set %+v", rs.ObjectMeta)
	}
	if len(a.Spec.Selector.MatchLabels) != 1 || len(a.Spec.Template.Labels) != 1 {
		t.Error("making a replica set changed its deployment")
	}
}

func TestBounds(t *testing.T) {
	for _, c := range []struct {
		n                  int32
		surge, unavailable string
		up, down           int32
	}{
		{10, "25%", "25%", 3, 2}, {1, "25%", "25%", 1, 0}, {4, "0", "0", 0, 1}, {10, "0%", "5%", 0, 1},
		{3, "100%", "100%", 3, 3}, {2, "5", "5", 5, 2}, {0, "1", "0", 1, 0},
	} {
		if up, down := rollingUpdateBounds(deploy(c.n, 1, c.surge, c.unavailable)); up != c.up || down != c.down {
			t.Errorf("%d replicas, surge %s, unavailable %s: %d and %d, want %d and %d", c.n, c.surge, c.unavailable,
				up, down, c.up, c.down)
		}
	}
}
