package job

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func jobOf(n, parallel int32, change ...func(*batchv1.Job)) *batchv1.Job {
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "work", UID: "job"},
		Spec: batchv1.JobSpec{Completions: &n, Parallelism: &parallel, BackoffLimit: ptr(6),
			Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever,
				Containers: []corev1.Container{{Name: "c"}}}}},
	}
	started := metav1.NewTime(epoch.Add(-time.Minute))
	j.Status.StartTime = &started
	for _, c := range change {
		c(j)
	}
	return j
}

func ptr(n int32) *int32 { return &n }

func byIndex(j *batchv1.Job) { m := batchv1.IndexedCompletion; j.Spec.CompletionMode = &m }
func openEnd(j *batchv1.Job) { j.Spec.Completions = nil }
func paused(j *batchv1.Job)  { t := true; j.Spec.Suspend = &t }
func wasPaused(j *batchv1.Job) {
	j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionTrue}}
}
func onFailure(j *batchv1.Job) { j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyOnFailure }
func limit(n int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Spec.BackoffLimit = &n }
}
func indexLimit(n int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) { byIndex(j); j.Spec.BackoffLimitPerIndex, j.Spec.BackoffLimit = &n, ptr(1<<30) }
}
func rules(list ...batchv1.PodFailurePolicyRule) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Spec.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: list} }
}
func onExit(action batchv1.PodFailurePolicyAction, codes ...int32) batchv1.PodFailurePolicyRule {
	return batchv1.PodFailurePolicyRule{Action: action, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
		Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: codes}}
}

// podsOf parses "run ok fail:3 going free:ok": a state for each pod; with an index in an indexed
// job, "2=run". "free" marks a pod that has been counted. Terminal pods ended an hour ago, "new"
// ones just now.
func podsOf(j *batchv1.Job, list string) (out []*corev1.Pod) {
	for n, f := range strings.Fields(list) {
		c := Creation{Index: -1}
		if index, state, ok := strings.Cut(f, "="); ok {
			_, _ = fmt.Sscan(index, &c.Index)
			f = state
		}
		parts := strings.Split(f, ":")
		if i := slices.IndexFunc(parts, func(s string) bool { return strings.HasPrefix(s, "after") }); i >= 0 {
			_, _ = fmt.Sscan(parts[i][5:], &c.Failed)
		}
		p := newPod(j, c)
		p.Name = fmt.Sprintf("p%d", n)
		p.UID = types.UID(p.Name)
		p.Status.Phase = corev1.PodRunning
		at := epoch.Add(-time.Hour)
		for _, w := range parts {
			switch {
			case w == "ok":
				p.Status.Phase = corev1.PodSucceeded
			case w == "fail":
				p.Status.Phase = corev1.PodFailed
			case w == "new":
				at = epoch.Add(-3 * time.Second)
			case w == "going":
				now := metav1.NewTime(epoch)
				p.DeletionTimestamp = &now
			case strings.HasPrefix(w, "restarted"):
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c"}}
				_, _ = fmt.Sscan(w[len("restarted"):], &p.Status.ContainerStatuses[0].RestartCount)
			case w == "free":
				p.Finalizers = nil
			case w == "disrupted":
				p.Status.Conditions = append(p.Status.Conditions,
					corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue})
			case w[0] >= '0' && w[0] <= '9':
				var code int32
				_, _ = fmt.Sscan(w, &code)
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{
					Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}}}
			}
		}
		p.Status.Conditions = append(p.Status.Conditions,
			corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(at)})
		out = append(out, p)
	}
	return out
}

func snapshotOf(j *batchv1.Job, pods []*corev1.Pod) Snapshot {
	return Snapshot{Job: j, Pods: pods, Now: epoch, Going: func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil
	}}
}

// words formats a step: its actions, and the new conditions.
func words(j *batchv1.Job, s Step) string {
	var out []string
	for _, c := range s.Create {
		w := "create"
		if c.Index >= 0 {
			w += fmt.Sprint(" ", c.Index)
		}
		if c.Failed+c.Ignored > 0 {
			w += fmt.Sprintf("(%d,%d)", c.Failed, c.Ignored)
		}
		out = append(out, w)
	}
	for _, l := range []struct {
		verb string
		pods []*corev1.Pod
	}{{"delete", s.Delete}, {"end", s.End}, {"count", s.Release}} {
		for _, p := range l.pods {
			out = append(out, l.verb+" "+p.Name)
		}
	}
	for _, c := range s.Status.Conditions {
		if c.Status == corev1.ConditionTrue && findTrueCondition(&j.Status, c.Type) == nil {
			out = append(out, string(c.Type)+" "+c.Reason)
		}
	}
	if s.Again > 0 {
		out = append(out, "again "+s.Again.String())
	}
	if s.Expired {
		out = append(out, "expired")
	}
	return strings.Join(out, ", ")
}

func planHalf(j *batchv1.Job) { j.Status.Succeeded = 2 }

func planFailing(j *batchv1.Job) {
	j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobFailureTarget, Status: corev1.ConditionTrue,
		Reason: "DeadlineExceeded"}}
}

func planOver(ttl int32, ago time.Duration) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		j.Spec.TTLSecondsAfterFinished = &ttl
		j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue,
			LastTransitionTime: metav1.NewTime(epoch.Add(-ago))}}
	}
}

func planDeadline(n int64) func(*batchv1.Job) {
	return func(j *batchv1.Job) { j.Spec.ActiveDeadlineSeconds = &n }
}

func planWhenFailed(j *batchv1.Job) { p := batchv1.Failed; j.Spec.PodReplacementPolicy = &p }

func planSuccess(indexes string, n int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) {
		byIndex(j)
		j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{
			Rules: []batchv1.SuccessPolicyRule{{SucceededIndexes: &indexes, SucceededCount: &n}}}
	}
}

func planLost(text string, most int32) func(*batchv1.Job) {
	return func(j *batchv1.Job) { indexLimit(0)(j); j.Status.FailedIndexes, j.Spec.MaxFailedIndexes = &text, &most }
}

// planCases are the cases of TestPlan.
var planCases = map[string]struct {
	job  *batchv1.Job
	pods string
	want string
}{
	"as many as may run":            {jobOf(5, 2), "", "create, create"},
	"as many as are left":           {jobOf(3, 2, planHalf), "", "create"},
	"one that runs counts":          {jobOf(5, 2), "run", "create"},
	"too many":                      {jobOf(5, 1), "run run", "delete p1"},
	"a success is counted":          {jobOf(5, 1), "ok", "create, count p0"},
	"what was counted is not":       {jobOf(5, 1), "free:ok", "create"},
	"done":                          {jobOf(1, 1), "ok", "count p0, SuccessCriteriaMet CompletionsReached"},
	"a failure is followed by rest": {jobOf(5, 1), "fail:new", "count p0, again 7s"},
	"two by a longer one":           {jobOf(5, 1), "fail:new free:fail:new", "count p0, again 17s"},
	"not after a while":             {jobOf(5, 1), "fail", "create, count p0"},
	"too many failures": {jobOf(5, 2, limit(0)), "run fail",
		"end p0, count p1, FailureTarget BackoffLimitExceeded"},
	"failures go before success": {jobOf(3, 1, planSuccess("0", 1), limit(0)), "0=ok 1=fail",
		"count p0, count p1, FailureTarget BackoffLimitExceeded"},
	"deadline goes before failed indexes": {jobOf(2, 2, indexLimit(0), planDeadline(60)), "0=fail 1=ok",
		"count p0, count p1, FailureTarget DeadlineExceeded"},
	"deadline restarts on resume": {jobOf(5, 1, planDeadline(30), wasPaused), "", "create, again 30s"},
	"restarts reach the limit": {jobOf(1, 1, limit(2), onFailure), "run:restarted2",
		"end p0, FailureTarget BackoffLimitExceeded"},
	"restarts stay below": {jobOf(1, 1, limit(2), onFailure), "run:restarted1", ""},
	"one restart is too many": {jobOf(1, 1, limit(0), onFailure), "run:restarted1",
		"end p0, FailureTarget BackoffLimitExceeded"},
	"restarts of a deleted pod count": {jobOf(1, 1, limit(2), onFailure), "run:going:new:restarted2",
		"count p0, FailureTarget BackoffLimitExceeded"},
	"it ends with its pods":     {jobOf(5, 2, planFailing), "run:going", "count p0"},
	"and when they have ended":  {jobOf(5, 2, planFailing), "free:fail", "Failed DeadlineExceeded"},
	"a deadline":                {jobOf(5, 1, planDeadline(60)), "run", "end p0, FailureTarget DeadlineExceeded"},
	"a deadline to come":        {jobOf(5, 1, planDeadline(90)), "run", "again 30s"},
	"a deleted pod has failed":  {jobOf(5, 1), "run:going:new", "count p0, again 7s"},
	"or only when it has ended": {jobOf(5, 1, planWhenFailed), "run:going", ""},
	"open end":                  {jobOf(0, 2, openEnd), "", "create, create"},
	"open end: one is done":     {jobOf(0, 2, openEnd), "ok run", "count p0"},
	"open end: all are": {jobOf(0, 2, openEnd), "ok free:ok",
		"count p0, SuccessCriteriaMet CompletionsReached"},
	"suspended": {jobOf(5, 2, paused), "run run",
		"delete p0, delete p1, Suspended JobSuspended"},
	"indexes":                      {jobOf(5, 3, byIndex), "1=run", "create 0, create 2"},
	"the index of a failure again": {jobOf(3, 3, byIndex), "0=run 1=fail 2=ok", "create 1, count p1, count p2"},
	"two of an index":              {jobOf(3, 3, byIndex), "0=run 0=run 1=run 2=run", "delete p1"},
	"one beyond the last":          {jobOf(2, 2, byIndex), "0=run 1=run 2=run", "delete p2"},
	"one of a done index":          {jobOf(2, 2, byIndex), "0=ok 0=run 1=run", "delete p1, count p0"},
	"exit code fails the job": {jobOf(3, 1, rules(onExit("FailJob", 42))), "fail:42",
		"count p0, FailureTarget PodFailurePolicy"},
	"exit code is ignored": {jobOf(3, 1, limit(0), rules(onExit("Ignore", 42))), "fail:42",
		"create, count p0"},
	"another exit code counts": {jobOf(3, 1, limit(0), rules(onExit("Ignore", 42))), "fail:1",
		"count p0, FailureTarget BackoffLimitExceeded"},
	"an index may fail once":   {jobOf(2, 2, indexLimit(1)), "0=fail 1=run", "create 0(1,0)"},
	"its successor lets it go": {jobOf(2, 2, indexLimit(1)), "0=fail 0=run:after1 1=run", "count p0"},
	"it has failed":            {jobOf(2, 2, indexLimit(1)), "0=fail:after1 1=run", "count p0"},
	"all others are done": {jobOf(2, 2, indexLimit(0)), "0=fail 1=ok",
		"count p0, count p1, FailureTarget FailedIndexes"},
	"an index fails by a rule": {jobOf(2, 2, indexLimit(5), rules(onExit("FailIndex", 3))),
		"0=fail:3 1=run", "count p0"},
	"an index' failure is ignored": {jobOf(2, 2, indexLimit(0), rules(onExit("Ignore", 3))), "0=fail:3 1=run",
		"create 0(0,1)"},
	"too many indexes have failed": {jobOf(5, 1, planLost("0,1", 1)), "2=run",
		"end p0, FailureTarget MaxFailedIndexesExceeded"},
	"success by some indexes": {jobOf(5, 3, planSuccess("0-2", 2)), "0=ok 2=ok 1=run 3=run",
		"end p2, end p3, count p0, count p1, SuccessCriteriaMet SuccessPolicy"},
	"not by others": {jobOf(5, 3, planSuccess("0-2", 2)), "0=ok 4=ok 1=run",
		"create 2, create 3, count p0, count p1"},
	"its time is over":               {jobOf(1, 1, planOver(60, time.Minute)), "", "expired"},
	"not yet":                        {jobOf(1, 1, planOver(60, 20*time.Second)), "", "again 40s"},
	"a finished job holds back none": {jobOf(1, 1, planOver(60, 0)), "ok run:going", "count p0, count p1, again 1m0s"},
}

func TestPlan(t *testing.T) {
	for name, c := range planCases {
		if got := words(c.job, PlanJob(snapshotOf(c.job, podsOf(c.job, c.pods)))); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestIndexes(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "3": "3", "1,2": "1,2", "1-3": "1-3", "1,2,3,5": "1-3,5", "5,1": "1,5", "4-9": "4-7", "8": "",
		"x,2-y,-1,3": "3", "0-2,2-4,6": "0-4,6",
	} {
		x := parseIndexes(text, 8)
		if got := x.String(); got != want || parseIndexes(got, 8).String() != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	x := parseIndexes("0-2,5", 10)
	if x.countIndexes() != 4 || !x.hasIndex(2) || x.hasIndex(3) || !x.hasIndex(5) || x.hasIndex(9) {
		t.Errorf("%v", x)
	}
	if got := fmt.Sprint(missingIndexes(3, 10, x, parseIndexes("3", 10))); got != "[4 6 7]" {
		t.Errorf("missing %s", got)
	}
	if got := fmt.Sprint(missingIndexes(9, 3)); got != "[0 1 2]" {
		t.Errorf("missing %s", got)
	}
}

func TestNewPod(t *testing.T) {
	j := jobOf(3, 1, indexLimit(2))
	j.Name = strings.Repeat("long", 15)
	p := newPod(j, Creation{Index: 12, Failed: 2, Ignored: 1})
	if indexOf(p) != 12 || !isTracked(p) || p.Labels[batchv1.JobCompletionIndexAnnotation] != "12" ||
		p.Spec.Containers[0].Env[0].Name != indexVariable ||
		len(p.GenerateName) > 58 || !strings.HasSuffix(p.GenerateName, "-12-") {
		t.Errorf("%+v %+v", p.ObjectMeta, p.Spec)
	}
	if f, i := failuresOf(p); f != 2 || i != 1 {
		t.Errorf("%d, %d", f, i)
	}
	if len(j.Spec.Template.Spec.Containers[0].Env) != 0 {
		t.Error("the template was changed")
	}
}

// world is a cluster with one job and its pods, and a controller that may be killed between any two
// writes.
type world struct {
	rnd       *rand.Rand
	job       *batchv1.Job
	pods      []*corev1.Pod
	now       time.Time
	uid       int
	succeeded int // pods that have ended well, and badly, whether counted or not
	failed    int
	wanted    int // results of the job's pods: one in some number fails
}

// killed reports whether the controller is killed now.
func (w *world) killed() bool { return w.rnd.IntN(12) == 0 }

func (w *world) reconcile() {
	step := PlanJob(Snapshot{Job: w.job, Pods: w.pods, Now: w.now, Going: func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil
	}})
	for _, p := range step.Delete {
		if w.killed() {
			return
		}
		p.Finalizers = nil
		w.delete(p)
	}
	for _, c := range step.Create {
		if w.killed() {
			return
		}
		p := newPod(w.job, c)
		w.uid++
		p.Name = fmt.Sprint("p", w.uid)
		p.UID = types.UID(p.Name)
		p.Status.Phase = corev1.PodRunning
		w.pods = append(w.pods, p)
	}
	if w.killed() {
		return
	}
	w.job.Status = step.Status
	for _, p := range step.End {
		if w.killed() {
			return
		}
		w.delete(p)
	}
	for _, p := range step.Release {
		if w.killed() {
			return
		}
		p.Finalizers = nil
	}
}

func (w *world) delete(p *corev1.Pod) {
	now := metav1.NewTime(w.now)
	p.DeletionTimestamp = &now
}

// live ends and deletes pods.
func (w *world) live() {
	var there []*corev1.Pod
	for _, p := range w.pods {
		if p.Status.Phase == corev1.PodRunning && w.rnd.IntN(3) == 0 {
			at := corev1.ContainerStateTerminated{FinishedAt: metav1.NewTime(w.now)}
			p.Status.Phase = corev1.PodSucceeded
			if w.wanted > 0 && w.rnd.IntN(w.wanted) == 0 || p.DeletionTimestamp != nil {
				p.Status.Phase, at.ExitCode = corev1.PodFailed, 1
			}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &at}}}
			if isTracked(p) {
				if p.Status.Phase == corev1.PodSucceeded {
					w.succeeded++
				} else {
					w.failed++
				}
			}
		}
		if p.DeletionTimestamp != nil && p.Status.Phase != corev1.PodRunning && !isTracked(p) {
			continue
		}
		there = append(there, p)
	}
	w.pods = there
	w.now = w.now.Add(time.Duration(w.rnd.IntN(60)) * time.Second)
}

// Whenever the controller is killed, each pod is counted once, never more pods run than permitted,
// and the job ends as expected.
func TestNothingIsMiscounted(t *testing.T) {
	for seed := range uint64(600) {
		w := &world{rnd: rand.New(rand.NewPCG(seed, 3)), now: epoch, wanted: 4 * int(seed%2)}
		n, parallel := int32(1+w.rnd.IntN(8)), int32(1+w.rnd.IntN(4))
		w.job = jobOf(n, parallel, limit(1000))
		switch seed % 3 {
		case 1:
			byIndex(w.job)
		case 2:
			indexLimit(1000)(w.job)
		}
		w.job.Status = batchv1.JobStatus{}
		for step := 0; findTrueCondition(&w.job.Status, batchv1.JobComplete) == nil; step++ {
			if step == 3000 {
				t.Fatalf("seed %d does not end: %+v", seed, w.job.Status)
			}
			w.reconcile()
			running := 0
			for _, p := range w.pods {
				if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
					running++
				}
			}
			if running > int(parallel) {
				t.Fatalf("seed %d: %d pods run, %d may", seed, running, parallel)
			}
			w.live()
		}
		s := w.job.Status
		if s.Succeeded != n || !isIndexed(w.job) && int(s.Succeeded) != w.succeeded || int(s.Failed) != w.failed {
			t.Fatalf("seed %d: counted %d and %d, there were %d and %d of %d", seed, s.Succeeded, s.Failed,
				w.succeeded, w.failed, n)
		}
		if u := s.UncountedTerminatedPods; u != nil && len(u.Succeeded)+len(u.Failed) > 0 {
			t.Fatalf("seed %d: uncounted %v", seed, u)
		}
	}
}
