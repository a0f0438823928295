package batch_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// endingWrongs returns the errors that Jobs and job templates can have. wrap returns the object,
// and at is the path prefix of the job spec.
func endingWrongs(wrap func(string) string, at string) []kindstest.InvalidPatch {
	indexed := func(more string) string { return wrap("completionMode: Indexed, completions: 3, " + more) }
	rule := func(s string) string { return wrap("podFailurePolicy: {rules: [{" + s + "}]}") }
	codes := func(s string) string { return rule("action: FailJob, onExitCodes: {" + s + "}") }
	met := func(s string) string { return indexed("successPolicy: {rules: [{" + s + "}]}") }
	const neg = ": Invalid value: -1: must be greater than or equal to 0"
	r0 := at + "podFailurePolicy.rules[0]"
	s0 := at + "successPolicy.rules[0]"
	return []kindstest.InvalidPatch{
		{Patch: wrap("parallelism: -1"), Want: at + "parallelism" + neg},
		{Patch: wrap("completions: -1"), Want: at + "completions" + neg},
		{Patch: wrap("backoffLimit: -1"), Want: at + "backoffLimit" + neg},
		{Patch: wrap("activeDeadlineSeconds: -1"), Want: at + "activeDeadlineSeconds" + neg},
		{Patch: wrap("ttlSecondsAfterFinished: -1"), Want: at + "ttlSecondsAfterFinished" + neg},
		{Patch: wrap("managedBy: me"), Want: at + `managedBy: Invalid value: "me": must be a domain-prefixed path`},
		{Patch: wrap("managedBy: example.com/" + strings.Repeat("a", 60)),
			Want: at + "managedBy: Too long: may not be more than 63 bytes"},
		{Patch: wrap("completionMode: Some"), Want: at +
			`completionMode: Unsupported value: "Some": supported values: "NonIndexed", "Indexed"`},
		{Patch: wrap("backoffLimitPerIndex: 1"),
			Want: at + "backoffLimitPerIndex: Invalid value: 1: requires indexed completion mode"},
		{Patch: indexed("maxFailedIndexes: 1"), Want: at +
			"backoffLimitPerIndex: Required value: when maxFailedIndexes is specified"},
		{Patch: indexed("backoffLimitPerIndex: 1, maxFailedIndexes: 4"),
			Want: at + "maxFailedIndexes: Invalid value: 4: must be less than or equal to completions"},
		{Patch: indexed("parallelism: 100001"), Want: at +
			"parallelism: Invalid value: 100001: must be less than or equal to 100000 when completion mode is Indexed"},
		{Patch: wrap("podReplacementPolicy: Soon"),
			Want: at + `podReplacementPolicy: Unsupported value: "Soon": supported values: "Failed", ` +
				`"TerminatingOrFailed"`},
		{Patch: wrap("template: {spec: {restartPolicy: Always}}"),
			Want: at + `template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"`},
		{Patch: rule("action: FailJob"), Want: r0 +
			": Invalid value: specifying one of OnExitCodes and OnPodConditions is required"},
		{Patch: rule("action: FailIndex, onPodConditions: [{type: A}]"),
			Want: r0 + `.action: Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set`},
		{Patch: rule("action: Cry, onPodConditions: [{type: A}]"),
			Want: r0 + `.action: Unsupported value: "Cry": supported values: "Count", "FailIndex", ` +
				`"FailJob", "Ignore"`},
		{Patch: rule("onPodConditions: [{type: A}]"),
			Want: r0 + `.action: Required value: valid values: ["Count" "FailIndex" "FailJob" "Ignore"]`},
		{Patch: rule("action: Count, onPodConditions: [{type: A, status: Maybe}]"),
			Want: r0 + `.onPodConditions[0].status: Unsupported value: "Maybe": supported values: "False", ` +
				`"True", "Unknown"`},
		{Patch: rule("action: Count, onPodConditions: [{type: A}], onExitCodes: {operator: In, values: [1]}"),
			Want: r0 + ": Invalid value: specifying both OnExitCodes and OnPodConditions is not supported"},
		{Patch: codes("operator: In"), Want: r0 +
			".onExitCodes.values: Invalid value: null: at least one value is required"},
		{Patch: codes("operator: In, values: [0]"),
			Want: r0 + ".onExitCodes.values[0]: Invalid value: 0: must not be 0 for the In operator"},
		{Patch: codes("operator: In, values: [1, 1]"), Want: r0 + ".onExitCodes.values[1]: Duplicate value: 1"},
		{Patch: codes("operator: In, values: [2, 1]"),
			Want: r0 + ".onExitCodes.values: Invalid value: [2,1]: must be ordered"},
		{Patch: codes("operator: Near, values: [1]"),
			Want: r0 + `.onExitCodes.operator: Unsupported value: "Near": supported values: "In", "NotIn"`},
		{Patch: codes("operator: In, values: [1], containerName: other"),
			Want: r0 + `.onExitCodes.containerName: Invalid value: "other": must be one of the container or ` +
				`initContainer names in the pod template`},
		{Patch: wrap("successPolicy: {rules: [{succeededCount: 1}]}"), Want: at + "successPolicy: Invalid value"},
		{Patch: indexed("successPolicy: {}"), Want: at +
			"successPolicy.rules: Required value: at least one rules must be specified when the " +
			"successPolicy is specified"},
		{Patch: met(""), Want: s0 + ": Required value: at least one of succeededCount or succeededIndexes " +
			"must be specified"},
		{Patch: met("succeededCount: 4"), Want: s0 +
			".succeededCount: Invalid value: 4: must be less than or equal to 3 (the number of specified completions)"},
		{Patch: met("succeededIndexes: '5'"), Want: s0 +
			`.succeededIndexes: Invalid value: "5": error parsing succeededIndexes: too large index: "5"`},
		{Patch: met("succeededIndexes: '1,0'"), Want: s0 +
			`.succeededIndexes: Invalid value: "1,0": error parsing succeededIndexes: non-increasing order, ` +
			`previous: 1, current: 0`},
		{Patch: met("succeededIndexes: '0-1', succeededCount: 3"),
			Want: s0 + ".succeededCount: Invalid value: 3: must be less than or equal to 2 (the number of indexes in " +
				"the specified succeededIndexes field)"},
	}
}

func TestJobValidation(t *testing.T) {
	spec := func(s string) string { return "spec: {" + s + "}" }
	kindstest.CheckRejected[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+kindstest.EndingTemplate+"}}",
		append(endingWrongs(spec, "spec."), []kindstest.InvalidPatch{
			{Patch: "metadata: {name: A}", Want: `metadata.name: Invalid value: "A"`},
			{Patch: spec("selector: {matchLabels: {a: b}}"),
				Want: "spec.selector: Invalid value; spec.template.metadata.labels: Invalid value"},
			{Patch: spec("template: {metadata: {labels: {job-name: other}}}"),
				Want: "spec.template.metadata.labels[job-name]: Invalid value"},
			{Patch: spec("manualSelector: true"),
				Want: "spec.selector: Required value; spec.template.metadata.labels: " +
					"Invalid value: null: `selector` does not match template `labels`"},
			{Patch: "metadata: {name: " + strings.Repeat("a", 63) + "}, " +
				spec("completionMode: Indexed, completions: 10"),
				Want: "metadata.name: Invalid value: \"" + strings.Repeat("a", 63) +
					"\": will not able to create pod with invalid DNS label"},
		}...))
	kindstest.CheckRejected[*batchv1.Job](t,
		"{metadata: {name: a}, spec: {manualSelector: true, selector: {matchLabels: {a: b}}, template: {metadata: "+
			"{labels: {a: b}}, spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}}}", nil)
}

func TestCronJobValidation(t *testing.T) {
	job := func(s string) string { return "spec: {jobTemplate: {spec: {" + s + "}}}" }
	zone := func(s string) kindstest.InvalidPatch {
		return kindstest.InvalidPatch{Patch: "spec: {timeZone: " + s + "}",
			Want: "spec.timeZone: Invalid value: \"" + s + "\": "}
	}
	at := func(s string) kindstest.InvalidPatch {
		return kindstest.InvalidPatch{Patch: "spec: {schedule: '" + s + "'}",
			Want: "spec.schedule: Invalid value: \"" + s + "\": "}
	}
	kindstest.CheckRejected[*batchv1.CronJob](t,
		"{metadata: {name: a}, spec: {schedule: '* * * * *', jobTemplate: {spec: {"+kindstest.EndingTemplate+"}}}}",
		append(endingWrongs(job, "spec.jobTemplate.spec."), []kindstest.InvalidPatch{
			{Patch: "metadata: {name: " + strings.Repeat("a", 53) + "}",
				Want: "metadata.name: Invalid value: \"" + strings.Repeat("a", 53) +
					"\": must be no more than 52 characters"},
			{Patch: "spec: {schedule: ''}", Want: "spec.schedule: Required value"},
			at("* * * *"), at("60 * * * *"), at("@often"), at("a b c d e"),
			{Patch: "spec: {schedule: 'TZ=UTC 0 * * * *'}",
				Want: "spec.schedule: Invalid value: \"TZ=UTC 0 * * * *\": cannot use TZ or CRON_TZ in schedule, use " +
					"timeZone field instead"},
			{Patch: "spec: {schedule: TZ=UTC}", Want: "spec.schedule: Invalid value; spec.schedule: Invalid value"},
			zone("Nowhere/Town"), zone("../etc"), zone("Local"), zone("UTC/"),
			{Patch: "spec: {timeZone: ''}",
				Want: "spec.timeZone: Invalid value: \"\": timeZone must be nil or non-empty string"},
			{Patch: "spec: {concurrencyPolicy: Maybe}",
				Want: `spec.concurrencyPolicy: Unsupported value: "Maybe": supported values: "Allow", ` +
					`"Forbid", "Replace"`},
			{Patch: "spec: {startingDeadlineSeconds: -1}", Want: "spec.startingDeadlineSeconds: Invalid value: -1"},
			{Patch: "spec: {successfulJobsHistoryLimit: -1}",
				Want: "spec.successfulJobsHistoryLimit: Invalid value: -1"},
			{Patch: "spec: {failedJobsHistoryLimit: -1}", Want: "spec.failedJobsHistoryLimit: Invalid value: -1"},
			{Patch: job("selector: {matchLabels: {a: b}}"),
				Want: "spec.jobTemplate.spec.selector: Invalid value: {\"matchLabels\":{\"a\":\"b\"}}: `selector` " +
					"will be auto-generated"},
			{Patch: job("manualSelector: true"), Want: `spec.jobTemplate.spec.manualSelector: Unsupported value: ` +
				`true: supported values: "nil", "false"`},
		}...))
	kindstest.CheckRejected[*batchv1.CronJob](t,
		"{metadata: {name: a}, spec: {schedule: '@daily', timeZone: Europe/Berlin, jobTemplate: {spec: {"+
			kindstest.EndingTemplate+"}}}}", nil)
}

func TestJobUpdates(t *testing.T) {
	stored := func(more string) *batchv1.Job {
		j := kindstest.Load[*batchv1.Job](t, "{metadata: {name: a, generation: 1}, spec: {"+more+
			kindstest.EndingTemplate+"}}")
		j.UID = "u1"
		kinds.All().ByType(j).Writes.PrepareCreate(j)
		return j
	}
	node := func(j *batchv1.Job) { j.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"} }
	running := stored("suspend: true, ")
	running.Status.StartTime = new(kindstest.Ago(time.Second))
	for _, c := range []struct {
		name   string
		job    *batchv1.Job
		change func(*batchv1.Job)
		want   string
	}{
		{"parallelism", stored(""), func(j *batchv1.Job) { j.Spec.Parallelism = new(int32(4)) }, ""},
		{"completions", stored(""), func(j *batchv1.Job) { j.Spec.Completions = new(int32(4)) }, "spec.completions"},
		{"elastic", stored("completionMode: Indexed, completions: 2, "), func(j *batchv1.Job) {
			j.Spec.Completions, j.Spec.Parallelism = new(int32(4)), new(int32(4))
		}, ""},
		{"not in tandem", stored("completionMode: Indexed, completions: 2, "), func(j *batchv1.Job) {
			j.Spec.Completions = new(int32(4))
		}, "spec.completions"},
		{"mode", stored(""), func(j *batchv1.Job) {
			j.Spec.CompletionMode = new(batchv1.IndexedCompletion)
		}, "spec.completionMode"},
		{"manager", stored(""), func(j *batchv1.Job) { j.Spec.ManagedBy = new("example.com/x") }, "spec.managedBy"},
		{"template", stored(""), node, "spec.template"},
		{"suspended", stored("suspend: true, "), node, ""},
		{"suspended: resources", stored("suspend: true, "), func(j *batchv1.Job) {
			j.Spec.Template.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
		}, ""},
		{"suspended: image", stored("suspend: true, "), func(j *batchv1.Job) {
			j.Spec.Template.Spec.Containers[0].Image = "j"
		}, "spec.template"},
		{"suspended, but begun", running, node, "spec.template"},
	} {
		if _, wrong := kindstest.RunUpdate(t, c.job, "", c.change); strings.Join(wrong, ",") != c.want {
			t.Errorf("%s: %q, want %q", c.name, wrong, c.want)
		}
	}
}

// A job without a selector gets one that no other has; what is the user's stays.
func TestJobSelectsItsPods(t *testing.T) {
	j := kindstest.Load[*batchv1.Job](t, "{metadata: {name: a}, spec: {template: {metadata: {labels: {app: x}}, spec: "+
		"{restartPolicy: Never, containers: [{name: c, image: i}]}}}}")
	j.UID = "u1"
	kinds.All().ByType(j).Writes.PrepareCreate(j)
	want := map[string]string{"app": "x", "job-name": "a", "controller-uid": "u1", "batch.kubernetes.io/job-name": "a",
		"batch.kubernetes.io/controller-uid": "u1"}
	if !maps.Equal(j.Spec.Template.Labels, want) || !maps.Equal(j.Labels, want) ||
		!maps.Equal(j.Spec.Selector.MatchLabels, map[string]string{"batch.kubernetes.io/controller-uid": "u1"}) {
		t.Errorf("labels %v and %v, selector %v", j.Spec.Template.Labels, j.Labels, j.Spec.Selector)
	}
}

// What a report may not say of a job: an end without a reason, less than before, another end.
func TestJobStatusUpdates(t *testing.T) {
	j := kindstest.Load[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+kindstest.EndingTemplate+"}}")
	condition := func(types ...batchv1.JobConditionType) []batchv1.JobCondition {
		var out []batchv1.JobCondition
		for _, c := range types {
			out = append(out, batchv1.JobCondition{Type: c, Status: corev1.ConditionTrue})
		}
		return out
	}
	done := j.DeepCopy()
	done.Status = batchv1.JobStatus{Succeeded: 1, StartTime: new(kindstest.Ago(time.Minute)),
		CompletionTime: new(kindstest.Ago(time.Second)),
		Conditions:     condition(batchv1.JobSuccessCriteriaMet, batchv1.JobComplete)}
	for _, c := range []struct {
		name   string
		from   *batchv1.Job
		change func(*batchv1.JobStatus)
		want   string
	}{
		{"complete", j, func(s *batchv1.JobStatus) { *s = done.Status }, ""},
		{"negative", j, func(s *batchv1.JobStatus) {
			s.Active = -1
		}, "status.active: Invalid value: -1: must be greater than or equal to 0"},
		{"no reason", j, func(s *batchv1.JobStatus) {
			s.Conditions, s.StartTime = condition(batchv1.JobFailed), new(kindstest.Ago(time.Second))
		},
			"status.conditions: Invalid value: cannot set Failed=True condition without the " +
				"FailureTarget=true condition"},
		{"no start", j, func(s *batchv1.JobStatus) {
			s.Conditions = condition(batchv1.JobFailed, batchv1.JobFailureTarget)
		}, "status.startTime: Required value: startTime is required for finished job"},
		{"indexes", j, func(s *batchv1.JobStatus) {
			s.CompletedIndexes = "0"
		}, "status.completedIndexes: Invalid value: \"0\": cannot set non-empty completedIndexes when non-indexed " +
			"completion mode"},
		{"more ready", j, func(s *batchv1.JobStatus) {
			s.Ready = new(int32(1))
		}, "status.ready: Invalid value: 1: cannot set more ready pods than active"},
		{"less", done, func(s *batchv1.JobStatus) {
			s.Succeeded = 0
		}, "status.succeeded: Invalid value: 0: cannot decrease the succeeded counter"},
		{"active", done, func(s *batchv1.JobStatus) {
			s.Active = 1
		}, "status.active: Invalid value: 1: active>0 is invalid for finished job"},
	} {
		now := c.from.DeepCopy()
		c.change(&now.Status)
		var want []string
		if c.want != "" {
			want = []string{c.want}
		}
		kindstest.CheckErrors(t, c.name, batch.ValidateJobStatusUpdate(now, c.from), want...)
	}
}

// The start time of a job changes while the job is suspended and when it is resumed, and at no other time. F11
func TestJobStartTimeUpdates(t *testing.T) {
	at := func(n int) *metav1.Time { return new(metav1.NewTime(time.Unix(int64(n), 0))) }
	paused := []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionTrue}}
	resumed := []batchv1.JobCondition{{Type: batchv1.JobSuspended, Status: corev1.ConditionFalse}}
	finished := []batchv1.JobCondition{{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue},
		{Type: batchv1.JobComplete, Status: corev1.ConditionTrue}}
	const immutable = "status.startTime: Invalid value: "
	for _, c := range []struct {
		name, spec string
		was, now   batchv1.JobStatus
		want       string
	}{
		{"running, moved", "", batchv1.JobStatus{StartTime: at(1)}, batchv1.JobStatus{StartTime: at(2)}, immutable},
		{"running, removed", "", batchv1.JobStatus{StartTime: at(1)}, batchv1.JobStatus{}, immutable},
		{"suspended, removed", "suspend: true, ", batchv1.JobStatus{StartTime: at(1)},
			batchv1.JobStatus{Conditions: paused}, ""},
		{"resumed", "", batchv1.JobStatus{StartTime: at(1), Conditions: paused},
			batchv1.JobStatus{StartTime: at(2), Conditions: resumed}, ""},
		{"resumed before", "", batchv1.JobStatus{StartTime: at(1), Conditions: resumed},
			batchv1.JobStatus{StartTime: at(2), Conditions: resumed}, immutable},
		{"nothing to do", "suspend: true, completions: 0, ", batchv1.JobStatus{},
			batchv1.JobStatus{Conditions: finished, CompletionTime: at(3)}, ""},
		{"elastic", "completionMode: Indexed, completions: 2, parallelism: 2, ",
			batchv1.JobStatus{Succeeded: 2, CompletedIndexes: "0,1"},
			batchv1.JobStatus{Succeeded: 1, CompletedIndexes: "0"}, ""},
		{"not elastic", "completionMode: Indexed, completions: 2, parallelism: 1, ",
			batchv1.JobStatus{Succeeded: 2, CompletedIndexes: "0,1"},
			batchv1.JobStatus{Succeeded: 1, CompletedIndexes: "0"}, "status.succeeded: "},
	} {
		old := kindstest.Load[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+c.spec+kindstest.EndingTemplate+"}}")
		old.Status = c.was
		now := old.DeepCopy()
		now.Status = c.now
		errs := batch.ValidateJobStatusUpdate(now, old)
		if (c.want == "") != (len(errs) == 0) || len(errs) > 0 && !strings.HasPrefix(errs[0].Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, errs, c.want)
		}
	}
}
