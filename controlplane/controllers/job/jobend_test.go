package job_test

import (
	"fmt"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// runningPod waits for a running pod of a job, and returns it.
func runningPod(w *testcluster.Cluster, job string) *corev1.Pod {
	w.T.Helper()
	var out *corev1.Pod
	w.Eventually("a pod of "+job+" runs", func() error {
		list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default",
			metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job})
		if err != nil {
			return err
		}
		for _, p := range list {
			if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil {
				out = p
				return nil
			}
		}
		return fmt.Errorf("none of %d pods", len(list))
	})
	return out
}

// A Job with restartPolicy OnFailure whose container reaches the backoff limit in its pod fails
// with that single pod, even if the controller is interrupted between deleting the pod and writing
// the Job's status. F11
func TestJobOnFailureRunsOnePod(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.CutOff("job-controller", 2, 2*time.Millisecond)})
		seen, err := w.WatchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer seen.Stop()
		const jobs = 30
		for i := range jobs {
			j, one := testcluster.NewJob(fmt.Sprint("j", i), 1, 1, ""), int32(1)
			j.Spec.Template.Spec.RestartPolicy, j.Spec.BackoffLimit = corev1.RestartPolicyOnFailure, &one
			w.CreateObject(j)
		}
		for i := range jobs {
			p := runningPod(w, fmt.Sprint("j", i)).DeepCopy()
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: 1, Image: "work:1",
				ImageID: "work"}}
			if _, err := client.UpdateStatus(w.Ctx, w.Admin, p); err != nil {
				t.Fatal(err)
			}
		}
		for i := range jobs {
			s := jobIs(w, fmt.Sprint("j", i), batchv1.JobFailed).Status
			if s.Failed != 1 || s.Conditions[len(s.Conditions)-1].Reason != batchv1.JobReasonBackoffLimitExceeded {
				t.Errorf("job j%d: %+v", i, s)
			}
		}
		time.Sleep(time.Minute) // virtual
		seen.Stop()
		created := map[string]int{}
		for ev := range seen.ResultChan() {
			if ev.Type == watch.Added {
				created[ev.Object.(*corev1.Pod).Labels[batchv1.JobNameLabel]]++
			}
		}
		for name, n := range created {
			if n != 1 {
				t.Errorf("job %s: %d pods, want 1", name, n)
			}
		}
	})
}

// A suspended Job has no start time. Resumed, it starts again, and so does its deadline. F11
func TestJobResumeResetsDeadline(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		j, deadline := testcluster.NewJob("w", 1, 1, ""), int64(60)
		j.Spec.ActiveDeadlineSeconds = &deadline
		w.CreateObject(j)
		runningPod(w, "w")
		suspend := func(yes bool) {
			t.Helper()
			testcluster.Update(w, "w", func(j *batchv1.Job) { j.Spec.Suspend = &yes })
		}
		for range 3 {
			suspend(true)
			if s := jobIs(w, "w", batchv1.JobSuspended).Status; s.StartTime != nil {
				t.Errorf("the suspended job started at %s", s.StartTime)
			}
			time.Sleep(2 * time.Minute) // virtual
			suspend(false)
			resumed := time.Now()
			runningPod(w, "w")
			time.Sleep(40 * time.Second) // virtual
			j, err := client.Get[*batchv1.Job](w.Ctx, w.Admin, "default", "w")
			if err != nil {
				t.Fatal(err)
			}
			if s := j.Status; s.StartTime == nil || s.StartTime.Sub(resumed).Abs() > 10*time.Second || s.Active != 1 {
				t.Fatalf("40 s after it was resumed at %s: %+v", resumed, s)
			}
		}
		time.Sleep(25 * time.Second) // virtual
		s := jobIs(w, "w", batchv1.JobFailed).Status
		if got := s.Conditions[len(s.Conditions)-1].Reason; got != batchv1.JobReasonDeadlineExceeded {
			t.Errorf("failed by %s", got)
		}
	})
}
