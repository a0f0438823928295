package kinds

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"keelson.dev/keelson/controlplane/api"
)

// Columns in the words of kubectl. A wide column is shown by "-o wide" only.
var (
	nameCol = metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name", Description: "Name must be unique within its namespace or, for kinds without one, within the cluster."}
	ageCol  = metav1.TableColumnDefinition{Name: "Age", Type: "string", Description: "Time since the object was created."}
)

func columns(cols ...metav1.TableColumnDefinition) []metav1.TableColumnDefinition { return cols }

func col(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "string", Description: name}
}

func numCol(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "integer", Description: name}
}

func boolCol(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "boolean", Description: name}
}

func wide(name string) metav1.TableColumnDefinition {
	c := col(name)
	c.Priority = 1
	return c
}

const (
	unknown = "<unknown>"
	none    = "<none>"
	unset   = "<unset>"
)

// age is the time since o was created, as kubectl writes it.
func age(o api.Object, now time.Time) string { return since(o.GetCreationTimestamp(), now) }

func since(t metav1.Time, now time.Time) string {
	if t.IsZero() {
		return unknown
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

// orNone shows an absent value.
func orNone(s string) string {
	if s == "" {
		return none
	}
	return s
}

type columnDef = metav1.TableColumnDefinition

func microTime(t metav1.MicroTime) metav1.Time { return metav1.Time{Time: t.Time} }

// dateCol and date are for the few kinds that show when they were made instead of their age.
var dateCol = columnDef{Name: "Created At", Type: "date", Description: "When the object was created."}

func date(o api.Object) any { return o.GetCreationTimestamp().UTC().Format(time.RFC3339) }
