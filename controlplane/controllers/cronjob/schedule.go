package cronjob

import (
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"

	"keelson.dev/keelson/controlplane/api/kinds/batch"
)

// times computes the scheduled times of a CronJob from its schedule and time zone.
type times struct {
	schedule cron.Schedule
	zone     *time.Location
}

// timesOf parses the schedule and time zone of CronJob c. local is the time zone of a CronJob
// without one. It returns an Event if the schedule or time zone is invalid.
func timesOf(c *batchv1.CronJob, local *time.Location) (times, *Event) {
	t := times{zone: local}
	if name := c.Spec.TimeZone; name != nil {
		zone, err := time.LoadLocation(*name)
		if err != nil {
			return t, warningEvent("UnknownTimeZone", "invalid timeZone: %q: %v", *name, err)
		}
		t.zone = zone
	}
	var err error
	if t.schedule, err = batch.ParseSchedule(c.Spec.Schedule); err != nil {
		return t, warningEvent("UnparseableSchedule", "unparseable schedule: %q : %v", c.Spec.Schedule, err)
	}
	return t, nil
}

// nextTime returns the first scheduled time later than start. It returns the zero time if none
// follows within five years.
func (t times) nextTime(start time.Time) time.Time { return t.schedule.Next(start.In(t.zone)) }

// fixedInterval returns the interval of an @every schedule, or 0 for other schedules.
func (t times) fixedInterval() time.Duration {
	if s, ok := t.schedule.(cron.ConstantDelaySchedule); ok {
		return s.Delay
	}
	return 0
}

// lastTime returns the latest scheduled time in the interval (start, end], which excludes start and
// includes end. ok is false if the interval contains no scheduled time. It takes a few dozen steps,
// however long the interval is.
func (t times) lastTime(start, end time.Time) (last time.Time, ok bool) {
	first := t.nextTime(start)
	if first.IsZero() || first.After(end) {
		return time.Time{}, false
	}
	if d := t.fixedInterval(); d > 0 {
		return first.Add(end.Sub(first) / d * d), true
	}
	// For times before the latest scheduled time, the next scheduled time has passed. For later
	// times it has not.
	low, high := start.Unix(), end.Unix()
	for high-low > 1 {
		mid := low + (high-low)/2
		if next := t.nextTime(time.Unix(mid, 0)); next.IsZero() || next.After(end) {
			high = mid
		} else {
			low = mid
		}
	}
	return time.Unix(high, 0).In(t.zone), true
}

// manyMissed is the number of missed scheduled times above which a warning is recorded.
const manyMissed = 100

// hasManyMissed reports whether more than manyMissed scheduled times lie between start and end.
func (t times) hasManyMissed(start, end time.Time) bool {
	if d := t.fixedInterval(); d > 0 {
		return end.Sub(start)/d > manyMissed
	}
	for range manyMissed + 1 {
		start = t.nextTime(start)
		if start.IsZero() || start.After(end) {
			return false
		}
	}
	return true
}

func warningEvent(reason, format string, args ...any) *Event {
	return &Event{Type: "Warning", Reason: reason, Message: fmt.Sprintf(format, args...)}
}
