package cronjob

import (
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"

	"keelson.dev/keelson/controlplane/api/kinds/batch"
)

// times computes the scheduled times of a CronJob: it is a schedule with its time zone.
type times struct {
	schedule cron.Schedule
	zone     *time.Location
}

// timesOf parses the schedule and time zone of CronJob c. local is the time zone if c names none.
// It returns an Event if the schedule or time zone is invalid.
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

// nextTime returns the first scheduled time after another time. It returns the zero time if there
// is none within five years.
func (t times) nextTime(after time.Time) time.Time { return t.schedule.Next(after.In(t.zone)) }

// fixedInterval returns the interval of an @every schedule, or 0 for other schedules.
func (t times) fixedInterval() time.Duration {
	if s, ok := t.schedule.(cron.ConstantDelaySchedule); ok {
		return s.Delay
	}
	return 0
}

// lastTime returns the latest scheduled time after from that is not after now. ok is false if there
// is none. It takes a few dozen steps, however long ago from is.
func (t times) lastTime(from, now time.Time) (last time.Time, ok bool) {
	first := t.nextTime(from)
	if first.IsZero() || first.After(now) {
		return time.Time{}, false
	}
	if d := t.fixedInterval(); d > 0 {
		return first.Add(now.Sub(first) / d * d), true
	}
	// For times before the latest scheduled time, the next scheduled time has passed. For later
	// times it has not.
	low, high := from.Unix(), now.Unix()
	for high-low > 1 {
		mid := low + (high-low)/2
		if next := t.nextTime(time.Unix(mid, 0)); next.IsZero() || next.After(now) {
			high = mid
		} else {
			low = mid
		}
	}
	return time.Unix(high, 0).In(t.zone), true
}

// many is the number of missed scheduled times above which a warning is recorded.
const many = 100

// tooMany reports whether there are more than many scheduled times between from and now.
func (t times) tooMany(from, now time.Time) bool {
	if d := t.fixedInterval(); d > 0 {
		return now.Sub(from)/d > many
	}
	for range many + 1 {
		from = t.nextTime(from)
		if from.IsZero() || from.After(now) {
			return false
		}
	}
	return true
}

func warningEvent(reason, format string, args ...any) *Event {
	return &Event{Type: "Warning", Reason: reason, Message: fmt.Sprintf(format, args...)}
}
