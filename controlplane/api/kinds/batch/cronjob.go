package batch

import (
	"fmt"
	"regexp"
	"strings"
	"time"
	_ "time/tzdata"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// cronJobSuffix is the length of the suffix in the names of a CronJob's Jobs.
const cronJobSuffix = len("-1234567890")

// CronJobKind returns the definition of the kind CronJob.
func CronJobKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: batchv1.SchemeGroupVersion, Kind: "CronJob", Plural: "cronjobs", Singular: "cronjob",
		Short: []string{"cj"}, InAllCategory: true,
	}, func(l *batchv1.CronJobList) *[]batchv1.CronJob { return &l.Items })
	k.Writes.Default = builder.Default(func(c *batchv1.CronJob) {
		s := &c.Spec
		builder.SetDefault(&s.ConcurrencyPolicy, batchv1.AllowConcurrent)
		builder.SetDefaultPtr(&s.Suspend, false)
		builder.SetDefaultPtr(&s.SuccessfulJobsHistoryLimit, 3)
		builder.SetDefaultPtr(&s.FailedJobsHistoryLimit, 1)
		defaultCronJobTemplate(&s.JobTemplate.Spec)
	})
	builder.SeparateSpecAndStatus(k, func(c *batchv1.CronJob) *batchv1.CronJobSpec { return &c.Spec },
		func(c *batchv1.CronJob) *batchv1.CronJobStatus { return &c.Status })
	before := k.Validation.Object
	k.Validation.Object = func(o api.Object) field.ErrorList {
		c := o.(*batchv1.CronJob)
		errs := append(before(o), validateCronJobSpec(&c.Spec, field.NewPath("spec"))...)
		if len(c.Name) > utilvalidation.DNS1035LabelMaxLength-cronJobSuffix {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), c.Name,
				"must be no more than 52 characters"))
		}
		return errs
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Schedule"),
		builder.StringColumn("Timezone"),
		builder.BoolColumn("Suspend"), builder.NumberColumn("Active"), builder.StringColumn("Last Schedule"),
		builder.AgeColumn,
		builder.WideColumn("Containers"), builder.WideColumn("Images"), builder.WideColumn("Selector"))
	k.Lists.Row = builder.Row(func(c *batchv1.CronJob, now time.Time) []any {
		last, zone, suspended := builder.None, builder.None, builder.Unset
		if t := c.Status.LastScheduleTime; t != nil {
			last = builder.Since(*t, now)
		}
		if c.Spec.TimeZone != nil {
			zone = *c.Spec.TimeZone
		}
		switch s := c.Spec.Suspend; {
		case s != nil && *s:
			suspended = "True"
		case s != nil:
			suspended = "False"
		}
		containers, images := podspec.ContainersAndImages(&c.Spec.JobTemplate.Spec.Template.Spec)
		return []any{c.Name, c.Spec.Schedule, zone, suspended, int64(len(c.Status.Active)), last, builder.Age(c, now),
			containers, images, metav1.FormatLabelSelector(c.Spec.JobTemplate.Spec.Selector)}
	})
	return k
}

// defaultCronJobTemplate sets the defaults of a CronJob's job template. The defaults of the Job
// itself are set when the Job is created.
func defaultCronJobTemplate(s *batchv1.JobSpec) {
	defaultFailurePolicy(s.PodFailurePolicy)
	podspec.DefaultPodTemplate(&s.Template)
}

func validateCronJobSpec(s *batchv1.CronJobSpec, fldPath *field.Path) field.ErrorList {
	errs := validateSchedule(s.Schedule, fldPath.Child("schedule"))
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.StartingDeadlineSeconds, 0),
		fldPath.Child("startingDeadlineSeconds"))...)
	if s.TimeZone != nil {
		errs = append(errs, validateTimeZone(*s.TimeZone, fldPath.Child("timeZone"))...)
	}
	errs = append(errs, validateConcurrency(s.ConcurrencyPolicy, fldPath.Child("concurrencyPolicy"))...)
	job := fldPath.Child("jobTemplate", "spec")
	errs = append(errs, validateJobSpec(&s.JobTemplate.Spec, job)...)
	if sel := s.JobTemplate.Spec.Selector; sel != nil {
		errs = append(errs, field.Invalid(job.Child("selector"), sel, "`selector` will be auto-generated"))
	}
	if m := s.JobTemplate.Spec.ManualSelector; ptr.Deref(m, false) {
		errs = append(errs, field.NotSupported(job.Child("manualSelector"), *m, []string{"nil", "false"}))
	}
	errs = append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.SuccessfulJobsHistoryLimit, 0),
		fldPath.Child("successfulJobsHistoryLimit"))...)
	return append(errs, fieldrules.ValidateNonNegative(ptr.Deref(s.FailedJobsHistoryLimit, 0),
		fldPath.Child("failedJobsHistoryLimit"))...)
}

func validateConcurrency(p batchv1.ConcurrencyPolicy, fldPath *field.Path) field.ErrorList {
	switch p {
	case batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent:
		return nil
	case "":
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return field.ErrorList{field.NotSupported(fldPath, p, []batchv1.ConcurrencyPolicy{
		batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent,
	})}
}

// maxSchedule is the maximum length of a schedule that is parsed. Five fields that list every
// possible value are shorter.
const maxSchedule = 1024

func validateSchedule(schedule string, fldPath *field.Path) field.ErrorList {
	switch {
	case schedule == "":
		return field.ErrorList{field.Required(fldPath, "")}
	case len(schedule) > maxSchedule:
		return field.ErrorList{field.TooLong(fldPath, schedule, maxSchedule)}
	}
	var errs field.ErrorList
	if _, err := ParseSchedule(schedule); err != nil {
		errs = append(errs, field.Invalid(fldPath, schedule, err.Error()))
	}
	if strings.Contains(schedule, "TZ") {
		errs = append(errs, field.Invalid(fldPath, schedule,
			"cannot use TZ or CRON_TZ in schedule, use timeZone field instead"))
	}
	return errs
}

// ParseSchedule parses the schedule of a CronJob: five fields, or a macro such as "@hourly".
func ParseSchedule(schedule string) (s cron.Schedule, err error) {
	defer func() { // the parser panics if no space follows TZ=
		if r := recover(); r != nil {
			err = fmt.Errorf("not a schedule: %q", schedule)
		}
	}()
	return cron.ParseStandard(schedule)
}

// zonePart matches one part of a time zone name between slashes, as in the tz database.
var zonePart = regexp.MustCompile(`^[A-Za-z\.\-_0-9+]{1,14}$`)

func validateTimeZone(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Invalid(fldPath, name, "timeZone must be nil or non-empty string")}
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "." || part == ".." || strings.HasPrefix(part, "-") || !zonePart.MatchString(part) {
			return field.ErrorList{field.Invalid(fldPath, name, "unknown time zone "+name)}
		}
	}
	if strings.EqualFold(name, "Local") {
		return field.ErrorList{field.Invalid(fldPath, name,
			"timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones")}
	}
	if _, err := time.LoadLocation(name); err != nil {
		return field.ErrorList{field.Invalid(fldPath, name, err.Error())}
	}
	return nil
}
