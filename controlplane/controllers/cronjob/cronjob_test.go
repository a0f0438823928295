package cronjob_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/cronjob"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// runs records the jobs that are created in the default namespace until the returned function is
// called.
func runs(w *testcluster.Cluster) func() []string {
	w.T.Helper()
	seen, err := w.Calls.Watch(w.Ctx, &api.Request{User: api.User{Name: "admin"}, Verb: api.VerbWatch,
		Kind: w.Admin.Kinds().ByType(&batchv1.Job{}), Namespace: "default"})
	if err != nil {
		w.T.Fatal(err)
	}
	var out []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ev := range seen.ResultChan() {
			if j, ok := ev.Object.(*batchv1.Job); ok && ev.Type == watch.Added {
				out = append(out, j.Name)
			}
		}
	}()
	return func() []string { seen.Stop(); <-done; return out }
}

// cronWorld returns a world of cron jobs and jobs in virtual time, which starts at a full hour.
func cronWorld(t *testing.T, change func(*engine.Descriptor)) *testcluster.Cluster {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, ChangeController: change,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{cronjob.New(d), job.New(d), garbagecollector.New(d)}
		}})
	w.AddNode("w1")
	return w
}

func cronJob(w *testcluster.Cluster, name string) *batchv1.CronJob {
	w.T.Helper()
	c, err := client.Get[*batchv1.CronJob](w.Ctx, w.Admin, "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	return c
}

// jobsNow are the names of the jobs that are there.
func jobsNow(w *testcluster.Cluster) []string {
	w.T.Helper()
	list, err := client.List[*batchv1.Job](w.Ctx, w.Admin, "default", metav1.ListOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	var out []string
	for _, j := range list {
		out = append(out, j.Name)
	}
	slices.Sort(out)
	return out
}

// A CronJob creates a Job at each scheduled time, even if its controller is interrupted at any
// point and leaders change. No run is duplicated or lost. The configured number of finished jobs is
// kept. F125
func TestCronJob(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := cronWorld(t, testcluster.CutOff("cronjob-controller", 2, 2*time.Millisecond))
		runs := runs(w)
		stop := w.Lead(engine.Options{})
		two, zero := int32(2), int32(0)
		w.CreateObject(testcluster.NewCronJob("keep", "*/10 * * * *", testcluster.NewJob("", 1, 1, "well"),
			func(s *batchv1.CronJobSpec) { s.SuccessfulJobsHistoryLimit = &two }))
		brief := testcluster.NewJob("", 1, 1, "well")
		brief.Spec.TTLSecondsAfterFinished = &zero
		w.CreateObject(testcluster.NewCronJob("brief", "*/10 * * * *", brief))
		w.CreateObject(testcluster.NewCronJob("never", "0 0 30 2 *", testcluster.NewJob("", 1, 1, "well")))
		for range 10 {
			time.Sleep(13 * time.Minute)
			stop()
			time.Sleep(time.Minute) // no leader, less than a period
			stop = w.Lead(engine.Options{})
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		stop()
		var want []string
		first := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Unix() / 60
		for i := int64(10); i <= 140; i += 10 {
			want = append(want, fmt.Sprintf("brief-%d", first+i), fmt.Sprintf("keep-%d", first+i))
		}
		slices.Sort(want)
		got := runs()
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("jobs were made\n%v, want\n%v", got, want)
		}
		if got, want := strings.Join(jobsNow(w), " "), fmt.Sprintf("keep-%d keep-%d", first+130, first+140); got !=
			want {
			t.Errorf("kept are %s, want %s", got, want)
		}
		if s := cronJob(w, "keep").Status; len(s.Active) != 0 || s.LastScheduleTime.Unix()/60 != first+140 ||
			s.LastSuccessfulTime == nil {
			t.Errorf("%+v", s)
		}
		w.AwaitEvent("InvalidSchedule", `invalid schedule: "0 0 30 2 *" : it has no time within the next five years`)
	})
}

// A job that still runs at the next scheduled time continues, delays the next job or is replaced. A
// suspended cron job creates no jobs, and a job that was created manually changes nothing.
func TestCronJobPolicies(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := cronWorld(t, nil)
		runs := runs(w)
		w.Lead(engine.Options{})
		policy := func(p batchv1.ConcurrencyPolicy) func(*batchv1.CronJobSpec) {
			return func(s *batchv1.CronJobSpec) { s.ConcurrencyPolicy = p }
		}
		yes := true
		w.CreateObject(testcluster.NewCronJob("allow", "*/10 * * * *", testcluster.NewJob("", 1, 1, ""),
			policy(batchv1.AllowConcurrent)))
		w.CreateObject(testcluster.NewCronJob("forbid", "*/10 * * * *", testcluster.NewJob("", 1, 1, ""),
			policy(batchv1.ForbidConcurrent)))
		w.CreateObject(testcluster.NewCronJob("replace", "*/10 * * * *", testcluster.NewJob("", 1, 1, ""),
			policy(batchv1.ReplaceConcurrent)))
		w.CreateObject(testcluster.NewCronJob("wait", "*/10 * * * *", testcluster.NewJob("", 1, 1, ""),
			func(s *batchv1.CronJobSpec) { s.Suspend = &yes }))
		time.Sleep(time.Minute)
		manual := testcluster.NewJob("manual", 1, 1, "")
		manual.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(cronJob(w, "forbid"),
			batchv1.SchemeGroupVersion.WithKind("CronJob"))}
		w.CreateObject(manual)
		time.Sleep(30 * time.Minute)
		virtual.Wait()
		first := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC).Unix() / 60
		at := func(name string, minute int64) string { return fmt.Sprintf("%s-%d", name, first+minute) }
		want := []string{at("allow", 10), at("allow", 20), at("allow", 30), at("forbid", 10), "manual",
			at("replace", 30)}
		if got := jobsNow(w); !slices.Equal(got, want) {
			t.Errorf("there are %v, want %v", got, want)
		}
		for name, n := range map[string]int{"allow": 3, "forbid": 1, "replace": 1, "wait": 0} {
			if s := cronJob(w, name).Status; len(s.Active) != n {
				t.Errorf("%s: %+v", name, s)
			}
		}
		w.AwaitEvent("JobAlreadyActive",
			"Not starting job because prior execution is running and concurrency policy is Forbid")
		w.AwaitEvent("UnexpectedJob", "Saw a job that the controller did not create or forgot: manual")
		// The running job ends: the latest missed run is started.
		background := metav1.DeletePropagationBackground
		if err := client.Delete[*batchv1.Job](w.Ctx, w.Admin, "default", at("forbid", 10),
			metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := jobsNow(w); !slices.Contains(got, at("forbid", 30)) || slices.Contains(got, at("forbid", 20)) {
			t.Errorf("there are %v", got)
		}
		w.AwaitEvent("MissingJob", "Active job went missing: "+at("forbid", 10))
		if all := runs(); len(all) != 3+2+1+3 {
			t.Errorf("jobs were made: %v", all)
		}
	})
}
