package job_test

import (
	"fmt"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// jobIs waits until a job has a condition, and returns it.
func jobIs(w *testcluster.Cluster, name string, t batchv1.JobConditionType) *batchv1.Job {
	w.T.Helper()
	var out *batchv1.Job
	w.EventuallyWithin(20*time.Second, "job "+name+" is "+string(t), func() error {
		j, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", name)
		if err != nil {
			return err
		}
		for _, c := range j.Status.Conditions {
			if c.Type == t && c.Status == corev1.ConditionTrue {
				out = j
				return nil
			}
		}
		return fmt.Errorf("%+v", j.Status)
	})
	return out
}

// F11: a Job runs until enough pods have succeeded, or fails. A suspended Job has no pods. A
// deleted Job leaves no pods, unless the deletion orphans them.
func TestJob(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewJob("once", 5, 2, "well"))
		j := jobIs(w, "once", batchv1.JobComplete)
		if s := j.Status; s.Succeeded != 5 || s.Failed != 0 || s.Active != 0 || s.CompletionTime == nil ||
			s.StartTime == nil || len(w.LivePods()) != 5 {
			t.Errorf("%d pods, %+v", len(w.LivePods()), s)
		}
		for _, p := range w.LivePods() {
			if len(p.Finalizers) > 0 || p.Labels[batchv1.JobNameLabel] != "once" {
				t.Errorf("%s has %v, %v", p.Name, p.Finalizers, p.Labels)
			}
		}
		w.AwaitEvent("Completed", "Job completed")

		zero := int32(0)
		bad := testcluster.NewJob("bad", 2, 2, "badly")
		bad.Spec.BackoffLimit = &zero
		w.CreateObject(bad)
		if s := jobIs(w, "bad", batchv1.JobFailed).Status; s.Failed != 2 ||
			s.Conditions[len(s.Conditions)-1].Reason != batchv1.JobReasonBackoffLimitExceeded {
			t.Errorf("%+v", s)
		}

		mode, yes := batchv1.IndexedCompletion, true
		each := testcluster.NewJob("each", 4, 4, "well")
		each.Spec.CompletionMode, each.Spec.Suspend = &mode, &yes
		w.CreateObject(each)
		jobIs(w, "each", batchv1.JobSuspended)
		w.Eventually("resuming", func() error {
			j, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", "each")
			if err != nil {
				return err
			}
			j = j.DeepCopy()
			*j.Spec.Suspend = false
			_, err = client.Update(w.Ctx, w.Admin, j)
			return err
		})
		if s := jobIs(w, "each", batchv1.JobComplete).Status; s.CompletedIndexes != "0-3" || s.Succeeded != 4 {
			t.Errorf("%+v", s)
		}

		// A Job that is deleted while its pods run.
		w.CreateObject(testcluster.NewJob("long", 3, 3, ""))
		w.Eventually("its pods run", func() error {
			if j, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", "long"); err != nil ||
				j.Status.Ready == nil || *j.Status.Ready != 3 {
				return fmt.Errorf("%v, %v", j, err)
			}
			return nil
		})
		background := metav1.DeletePropagationBackground
		if err := client.Delete[*batchv1.Job](w.Ctx, w.Admin, "default", "long",
			metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("its pods go", func() error { return noPodsOf(w, "long") })

		// A Job with a TTL of zero.
		brief := testcluster.NewJob("brief", 1, 1, "well")
		brief.Spec.TTLSecondsAfterFinished = &zero
		w.CreateObject(brief)
		w.Eventually("it goes with its pods", func() error {
			if _, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", "brief"); err == nil {
				return fmt.Errorf("the job is there")
			}
			return noPodsOf(w, "brief")
		})
	})
}

// noPodsOf returns an error while there are pods of a job, going ones too.
func noPodsOf(w *testcluster.Cluster, job string) error {
	list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default",
		metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job})
	if err != nil || len(list) > 0 {
		return fmt.Errorf("%d pods, %v", len(list), err)
	}
	return nil
}

// However often the controller is cut off in the middle, each pod is counted once. F125
func TestJobsAreCountedExactly(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.CutOff("job-controller", 2, 4*time.Millisecond)})
		mode := batchv1.IndexedCompletion
		for i := range 4 {
			j := testcluster.NewJob(fmt.Sprint("w", i), 30, 7, "well")
			if i%2 == 1 {
				j.Spec.CompletionMode = &mode
			}
			w.CreateObject(j)
		}
		for i := range 4 {
			s := jobIs(w, fmt.Sprint("w", i), batchv1.JobComplete).Status
			pods, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default",
				metav1.ListOptions{LabelSelector: fmt.Sprintf("%s=w%d", batchv1.JobNameLabel, i)})
			if err != nil || s.Succeeded != 30 || len(pods) != 30 || s.Failed != 0 {
				t.Errorf("%d pods, %v, %+v", len(pods), err, s)
			}
		}
	})
}
