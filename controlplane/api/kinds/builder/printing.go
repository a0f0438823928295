package builder

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"keelson.dev/keelson/controlplane/api"
)

// Common columns of tables, with the same names as in Kubernetes.
var (
	NameColumn = metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name",
		Description: "Name must be unique within its namespace or, for kinds without one, within the cluster."}
	AgeColumn = metav1.TableColumnDefinition{Name: "Age", Type: "string",
		Description: "Time since the object was created."}
)

// Columns returns its arguments as the columns of a table.
func Columns(cols ...metav1.TableColumnDefinition) []metav1.TableColumnDefinition { return cols }

// StringColumn returns a column of type string.
func StringColumn(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "string", Description: name}
}

// NumberColumn returns a column of type integer.
func NumberColumn(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "integer", Description: name}
}

// BoolColumn returns a column of type boolean.
func BoolColumn(name string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "boolean", Description: name}
}

// WideColumn returns a column of type string that "kubectl get -o wide" shows.
func WideColumn(name string) metav1.TableColumnDefinition {
	c := StringColumn(name)
	c.Priority = 1
	return c
}

const (
	Unknown = "<unknown>"
	None    = "<none>"
	Unset   = "<unset>"
)

// Age returns the time since the creation of an object, in kubectl's format.
func Age(obj api.Object, now time.Time) string { return Since(obj.GetCreationTimestamp(), now) }

// Since returns the time between t and now as kubectl prints it, or "<unknown>" if t is zero.
func Since(t metav1.Time, now time.Time) string {
	if t.IsZero() {
		return Unknown
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

// ValueOrNone returns s, or "<none>" if s is empty.
func ValueOrNone(s string) string {
	if s == "" {
		return None
	}
	return s
}

// ColumnDefinition is the definition of a column of a table.
type ColumnDefinition = metav1.TableColumnDefinition

// MicroTime converts a time with microseconds to a metav1.Time.
func MicroTime(t metav1.MicroTime) metav1.Time { return metav1.Time{Time: t.Time} }

// CreatedAtColumn and CreatedAt are for the few kinds with a table that contains the creation time
// instead of the age.
var CreatedAtColumn = ColumnDefinition{Name: "Created At", Type: "date", Description: "When the object was created."}

// CreatedAt returns the value of CreatedAtColumn for an object.
func CreatedAt(obj api.Object) any { return obj.GetCreationTimestamp().UTC().Format(time.RFC3339) }
