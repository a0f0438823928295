package cronjob

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func cronJob(schedule string, change ...func(*batchv1.CronJob)) *batchv1.CronJob {
	c := &batchv1.CronJob{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "tick", UID: "cron",
			CreationTimestamp: metav1.NewTime(epoch)},
		Spec: batchv1.CronJobSpec{Schedule: schedule, ConcurrencyPolicy: batchv1.AllowConcurrent,
			JobTemplate: batchv1.JobTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"},
					Annotations: map[string]string{"c": "d"}}}},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func policy(p batchv1.ConcurrencyPolicy) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Spec.ConcurrencyPolicy = p }
}
func deadline(s int64) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Spec.StartingDeadlineSeconds = &s }
}
func suspended(c *batchv1.CronJob) { yes := true; c.Spec.Suspend = &yes }
func zone(name string) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Spec.TimeZone = &name }
}
func ranAt(d time.Duration) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Status.LastScheduleTime = &metav1.Time{Time: epoch.Add(d)} }
}
func limits(well, badly int32) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) {
		c.Spec.SuccessfulJobsHistoryLimit, c.Spec.FailedJobsHistoryLimit = &well, &badly
	}
}

// jobOf returns a job that c created for a time. ended is its final condition, or "".
func jobOf(c *batchv1.CronJob, at time.Duration, ended batchv1.JobConditionType) *batchv1.Job {
	j := newJob(c, epoch.Add(at))
	j.UID = types.UID(j.Name)
	start := metav1.NewTime(epoch.Add(at))
	j.Status.StartTime = &start
	if ended != "" {
		j.Status.Conditions = []batchv1.JobCondition{{Type: ended, Status: corev1.ConditionTrue}}
		if ended == batchv1.JobComplete {
			done := metav1.NewTime(epoch.Add(at + time.Second))
			j.Status.CompletionTime = &done
		}
	}
	return j
}

func snapshot(c *batchv1.CronJob, now time.Duration, jobs ...*batchv1.Job) Snapshot {
	return Snapshot{CronJob: c, Jobs: jobs, Now: epoch.Add(now), Local: time.UTC, Going: func(j *batchv1.Job) bool {
		return j.DeletionTimestamp != nil
	}}
}

// words formats a step: "replace tick-1, run 12:01, say MissSchedule, again 1m0s".
func words(s Step) string {
	var out []string
	for _, j := range s.Replace {
		out = append(out, "replace "+j.Name)
	}
	if s.Run != nil {
		out = append(out, "run "+s.Run.UTC().Format("2 15:04:05"))
	}
	for _, e := range s.Events {
		out = append(out, "say "+e.Reason)
	}
	if s.Again > 0 {
		out = append(out, "again "+s.Again.String())
	}
	return strings.Join(out, ", ")
}

func TestPlan(t *testing.T) {
	minutely := cronJob("* * * * *", ranAt(0))
	forbid := cronJob("* * * * *", ranAt(0), policy(batchv1.ForbidConcurrent))
	replace := cronJob("* * * * *", ranAt(0), policy(batchv1.ReplaceConcurrent))
	byHand := jobOf(minutely, 0, "")
	byHand.Name, byHand.Annotations = "by-hand", nil
	future := jobOf(minutely, 1000*time.Hour, "")
	for name, c := range map[string]struct {
		s    Snapshot
		want string
	}{
		"before the first time": {snapshot(cronJob("5 * * * *"), 0), "again 5m0s"},
		"at the first time": {snapshot(cronJob("5 * * * *"), 5*time.Minute),
			"run 1 12:05:00, again 1h0m0s"},
		"not twice": {snapshot(cronJob("5 * * * *", ranAt(5*time.Minute)), 5*time.Minute),
			"again 1h0m0s"},
		"made, but not yet in the status": {snapshot(minutely, 80*time.Second, jobOf(minutely, time.Minute, "")),
			"again 40s"},
		"made by whom it is to be":   {snapshot(minutely, 80*time.Second, future), "run 1 12:01:00, again 40s"},
		"of three missed the newest": {snapshot(minutely, 200*time.Second), "run 1 12:03:00, again 40s"},
		"a hundred missed":           {snapshot(minutely, 100*time.Minute), "run 1 13:40:00, again 1m0s"},
		"more than a hundred": {snapshot(minutely, 101*time.Minute),
			"run 1 13:41:00, say TooManyMissedTimes, again 1m0s"},
		"those within the deadline count": {snapshot(cronJob("* * * * *", deadline(200)), 1000*time.Minute),
			"run 2 04:40:00, again 1m0s"},
		"within the deadline": {snapshot(cronJob("0 * * * *", deadline(30)), time.Hour+30*time.Second),
			"run 1 13:00:00, again 59m30s"},
		"past the deadline": {snapshot(cronJob("0 * * * *", deadline(30)), time.Hour+31*time.Second),
			"say MissSchedule, again 59m29s"},
		"a deadline without end": {snapshot(cronJob("0 * * * *", deadline(1<<62)), 3*time.Hour),
			"run 1 15:00:00, again 1h0m0s"},
		"suspended": {snapshot(cronJob("* * * * *", suspended), time.Hour), ""},
		"an older one runs": {snapshot(minutely, 130*time.Second, jobOf(minutely, time.Minute, "")),
			"run 1 12:02:00, again 50s"},
		"an older one runs and forbids": {snapshot(forbid, 130*time.Second, jobOf(forbid, time.Minute, "")),
			"say JobAlreadyActive, again 50s"},
		"an older one is over": {snapshot(forbid, 130*time.Second,
			jobOf(forbid, time.Minute, batchv1.JobFailed)), "run 1 12:02:00, again 50s"},
		"an older one is replaced": {snapshot(replace, 130*time.Second, jobOf(replace, time.Minute, "")),
			"replace tick-29539441, run 1 12:02:00, again 50s"},
		"one made by hand forbids nothing": {snapshot(forbid, 70*time.Second, byHand),
			"run 1 12:01:00, say UnexpectedJob, again 50s"},
		"a zone": {snapshot(cronJob("0 3 * * *", zone("Asia/Tokyo")), 6*time.Hour),
			"run 1 18:00:00, again 24h0m0s"},
		"a zone that is no more": {snapshot(cronJob("0 3 * * *", zone("Nowhere/Here")), 24*time.Hour),
			"say UnknownTimeZone"},
		"a schedule that is none": {snapshot(cronJob("every so often"), 24*time.Hour),
			"say UnparseableSchedule"},
		"a day that never comes": {snapshot(cronJob("0 0 30 2 *"), 24*time.Hour), "say InvalidSchedule"},
		"a leap day":             {snapshot(cronJob("0 0 29 2 *"), 0), "again 17508h0m0s"},
		"hourly": {snapshot(cronJob("@hourly"), 61*time.Minute),
			"run 1 13:00:00, again 59m0s"},
		"from one time to the next": {snapshot(cronJob("@every 7m", ranAt(time.Minute)), 23*time.Minute),
			"run 1 12:22:00, again 6m0s"},
		"every so often with a deadline": {snapshot(cronJob("@every 7m", deadline(10)), 14*time.Minute),
			"run 1 12:14:00, again 7m0s"},
		"after a clock that was years ahead": {snapshot(cronJob("* * * * *", ranAt(100000*time.Hour)), time.Minute),
			"again 100000h0m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := words(PlanCronJob(c.s)); got != c.want {
				t.Errorf("%s\nwant %s", got, c.want)
			}
		})
	}
}

func TestNewJob(t *testing.T) {
	c := cronJob("0 3 * * *", zone("Asia/Tokyo"))
	j := newJob(c, *PlanCronJob(snapshot(c, 6*time.Hour)).Run)
	if j.Name != "tick-29539800" || j.Annotations[batchv1.CronJobScheduledTimestampAnnotation] !=
		"2026-03-02T03:00:00+09:00" ||
		j.Annotations["c"] != "d" || j.Labels["a"] != "b" || !metav1.IsControlledBy(j, c) {
		t.Errorf("%+v", j.ObjectMeta)
	}
}

func TestStatusAndHistory(t *testing.T) {
	c := cronJob("* * * * *", limits(1, 0))
	jobs := []*batchv1.Job{
		jobOf(c, 1*time.Minute, batchv1.JobComplete), jobOf(c, 2*time.Minute, batchv1.JobFailed),
		jobOf(c, 3*time.Minute, batchv1.JobComplete), jobOf(c, 5*time.Minute, ""), jobOf(c, 4*time.Minute, ""),
	}
	c.Status.Active = []corev1.ObjectReference{{UID: jobs[2].UID, Name: jobs[2].Name}, {UID: "lost", Name: "lost"}}
	s, events := Status(snapshot(c, 6*time.Minute, jobs...), nil)
	if len(s.Active) != 2 || s.Active[0].Name != jobs[4].Name || s.Active[1].Name != jobs[3].Name ||
		!s.LastScheduleTime.Time.Equal(epoch.Add(5*time.Minute)) ||
		!s.LastSuccessfulTime.Time.Equal(epoch.Add(3*time.Minute+time.Second)) {
		t.Errorf("%+v", s)
	}
	if got := fmt.Sprint(events); got != "[{Normal SawCompletedJob Saw completed job: tick-29539443, condition: "+
		"Complete} {Normal MissingJob Active job went missing: lost}]" {
		t.Error(got)
	}
	var past []string
	for _, j := range Past(snapshot(c, 6*time.Minute, jobs...)) {
		past = append(past, j.Name)
	}
	if got := strings.Join(past, " "); got != jobs[0].Name+" "+jobs[1].Name {
		t.Errorf("of the past go %s", got)
	}
}

// The newest time is found as by going through all of them, also where clocks are put forward and back.
func TestTimesAgainstTwin(t *testing.T) {
	for _, schedule := range []string{"* * * * *", "*/7 * * * *", "30 1 * * *", "30 2 * * *", "15,45 0-3 * * 0",
		"0 0 31 * *", "@daily", "@every 90m", "@every 17s"} {
		for _, name := range []string{"UTC", "Europe/Berlin", "America/New_York", "Pacific/Auckland"} {
			rnd := rand.New(rand.NewPCG(1, 2))
			for range 6 {
				at, wrong := timesOf(cronJob(schedule, zone(name)), time.UTC)
				if wrong != nil {
					t.Fatal(wrong)
				}
				from := time.Date(2026, []time.Month{3, 10, 4}[rnd.IntN(3)], 1+rnd.IntN(28), rnd.IntN(24), rnd.IntN(60),
					rnd.IntN(60), 0, time.UTC)
				now := from.Add(time.Duration(rnd.IntN(50*3600))*time.Second + time.Duration(rnd.IntN(1e9)))
				var last time.Time
				n := 0
				for x := at.nextTime(from); !x.After(now); x = at.nextTime(x) {
					last, n = x, n+1
				}
				got, ok := at.lastTime(from, now)
				if ok != (n > 0) || ok && !got.Equal(last) {
					t.Errorf("%s in %s from %v until %v: %v, want %v of %d", schedule, name, from, now, got, last, n)
				}
				if got := at.hasManyMissed(from, now); got != (n > manyMissed) {
					t.Errorf("%s in %s from %v until %v: %d, too many: %v", schedule, name, from, now, n, got)
				}
			}
		}
	}
}

// world is the state that a controller sees which is interrupted between any two writes.
type world struct {
	rnd  *rand.Rand
	c    *batchv1.CronJob
	jobs []*batchv1.Job
	now  time.Duration
	made map[string]int // runs by the time that they are for
	most int            // that ran at once
}

func (w *world) killed() bool { return w.rnd.IntN(4) == 0 }

func (w *world) snapshot() Snapshot { return snapshot(w.c, w.now, w.jobs...) }

func (w *world) reconcile() (again time.Duration) {
	step := PlanCronJob(w.snapshot())
	for _, j := range step.Replace {
		if w.killed() {
			return 0
		}
		w.remove(j)
	}
	if step.Run != nil {
		if w.killed() {
			return 0
		}
		j := jobOf(w.c, step.Run.Sub(epoch), "")
		for _, have := range w.jobs {
			if have.Name == j.Name {
				panic("made twice while it is there: " + j.Name)
			}
		}
		w.made[j.Annotations[batchv1.CronJobScheduledTimestampAnnotation]]++
		w.jobs = append(w.jobs, j)
	}
	if w.killed() {
		return 0
	}
	w.c.Status, _ = Status(w.snapshot(), step.Run)
	for _, j := range Past(w.snapshot()) {
		if w.killed() {
			return 0
		}
		w.remove(j)
	}
	return step.Again
}

func (w *world) remove(gone *batchv1.Job) {
	var out []*batchv1.Job
	for _, j := range w.jobs {
		if j != gone {
			out = append(out, j)
		}
	}
	w.jobs = out
}

// live finishes jobs, and deletes jobs that have exceeded their TTL and are in the status.
func (w *world) live() {
	running := 0
	for _, j := range w.jobs {
		if finishedCondition(j) == nil && w.rnd.IntN(3) == 0 {
			j.Status.Conditions = []batchv1.JobCondition{{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
		}
		if finishedCondition(j) == nil {
			running++
		}
	}
	w.most = max(w.most, running)
	for _, j := range w.jobs {
		at, _ := scheduledTime(j)
		if finishedCondition(j) != nil && w.c.Status.LastScheduleTime != nil &&
			!at.After(w.c.Status.LastScheduleTime.Time) && w.rnd.IntN(2) == 0 {
			w.remove(j)
			return
		}
	}
}

// Whenever the controller is killed, each time of the schedule has its one run, as long as it comes back before the
// next; and no two run at once where that is not wanted.
func TestNoRunIsLostOrMadeTwice(t *testing.T) {
	for seed := range uint64(90) {
		w := &world{rnd: rand.New(rand.NewPCG(seed, 5)), made: map[string]int{}}
		w.c = cronJob("*/5 * * * *", limits(int32(seed%3), 0), policy([]batchv1.ConcurrencyPolicy{
			batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent}[seed/3%3]))
		const hours = 5
		for ; w.now < hours*time.Hour; w.now += time.Duration(1+w.rnd.IntN(30)) * time.Second {
			w.reconcile()
			w.live()
		}
		for at, n := range w.made {
			if n > 1 {
				t.Fatalf("seed %d: %d runs for %s", seed, n, at)
			}
		}
		if w.c.Spec.ConcurrencyPolicy != batchv1.AllowConcurrent && w.most > 1 {
			t.Fatalf("seed %d: %d run at once by %s", seed, w.most, w.c.Spec.ConcurrencyPolicy)
		}
		if n := len(w.made); w.c.Spec.ConcurrencyPolicy != batchv1.ForbidConcurrent && n != hours*12-1 {
			t.Fatalf("seed %d: %d runs in %d hours", seed, n, hours)
		}
	}
}
