package cronjob

import (
	"fmt"
	"time"

	"github.com/robfig/cron/v3"
	batchv1 "k8s.io/api/batch/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// times are the times of a schedule in a zone.
type times struct {
	schedule cron.Schedule
	zone     *time.Location
}

// timesOf reads a schedule. The error is an Event's reason and message.
func timesOf(c *batchv1.CronJob, local *time.Location) (times, *Event) {
	t := times{zone: local}
	if name := c.Spec.TimeZone; name != nil {
		zone, err := time.LoadLocation(*name)
		if err != nil {
			return t, warning("UnknownTimeZone", "invalid timeZone: %q: %v", *name, err)
		}
		t.zone = zone
	}
	var err error
	if t.schedule, err = kinds.ParseSchedule(c.Spec.Schedule); err != nil {
		return t, warning("UnparseableSchedule", "unparseable schedule: %q : %v", c.Spec.Schedule, err)
	}
	return t, nil
}

// next is the first time after another; the zero time where there is none within five years.
func (t times) next(after time.Time) time.Time { return t.schedule.Next(after.In(t.zone)) }

// every is the distance of times that are counted from the last one; 0 for those of the calendar.
func (t times) every() time.Duration {
	if s, ok := t.schedule.(cron.ConstantDelaySchedule); ok {
		return s.Delay
	}
	return 0
}

// last is the newest time after from that is not after now; ok is false where there is none. However long ago from is,
// it takes a few dozen steps.
func (t times) last(from, now time.Time) (last time.Time, ok bool) {
	first := t.next(from)
	if first.IsZero() || first.After(now) {
		return time.Time{}, false
	}
	if d := t.every(); d > 0 {
		return first.Add(now.Sub(first) / d * d), true
	}
	// That the next time after x has come holds for every x before the newest one, and for none from it on.
	low, high := from.Unix(), now.Unix()
	for high-low > 1 {
		mid := low + (high-low)/2
		if next := t.next(time.Unix(mid, 0)); next.IsZero() || next.After(now) {
			high = mid
		} else {
			low = mid
		}
	}
	return time.Unix(high, 0).In(t.zone), true
}

// many is how many times may have been missed before it is told of.
const many = 100

// tooMany says whether more than so many times have come after from.
func (t times) tooMany(from, now time.Time) bool {
	if d := t.every(); d > 0 {
		return now.Sub(from)/d > many
	}
	for range many + 1 {
		from = t.next(from)
		if from.IsZero() || from.After(now) {
			return false
		}
	}
	return true
}

func warning(reason, format string, args ...any) *Event {
	return &Event{Type: "Warning", Reason: reason, Message: fmt.Sprintf(format, args...)}
}
