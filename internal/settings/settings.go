// Package settings sets a daemon's flags from its environment and a configuration file. The command
// line has the highest priority, then the environment, the file, and the default. A key of the file
// is the flag's name. An environment variable is the flag's name in upper case with the prefix
// KEELSON_ and _ for -.
package settings

import (
	"fmt"
	"os"
	"strings"
)

// MaxSize is the largest accepted size of a configuration file, in bytes.
const MaxSize = 1 << 20

// Kind is the type of a setting's value in the configuration file.
type Kind int

const (
	Text       Kind = iota // text, or a number kept as written
	Bool                   // true or false
	Integer                // whole number
	List                   // list; the flag is set once per entry
	JoinedList             // list; the flag is set once with the entries joined by commas
)

func (k Kind) String() string {
	return [...]string{"text", "true or false", "a whole number", "a list", "a list"}[k]
}

// KindOf returns the kind of a flag's values. flagType is the name of the flag's type in package
// pflag.
func KindOf(flagType string) Kind {
	switch flagType {
	case "bool":
		return Bool
	case "int", "int32", "int64", "uint", "uint16", "uint32", "uint64":
		return Integer
	case "stringSlice", "stringArray", "stringToString":
		return List
	}
	return Text
}

// Flag is a setting: a command-line flag that the environment and the configuration file can set
// too.
type Flag struct {
	Name string
	Kind Kind
	// OnCommandLine means that the command line sets the flag. The environment and the
	// configuration file are then ignored.
	OnCommandLine bool
	// Set sets the flag to a value. If it is nil, the configuration file may contain the key, but
	// this command does not use it.
	Set func(string) error
}

// EnvironmentName returns the name of the environment variable that sets the flag.
func EnvironmentName(flag string) string {
	return "KEELSON_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Usage returns the help text of a flag: usage, followed by the flag's key in the configuration
// file and its environment variable.
func Usage(flag, usage string) string {
	return usage + " [key " + flag + ", " + EnvironmentName(flag) + "]"
}

// File is the configuration file. An empty path means that none exists. A missing file is an
// error only if Required is set.
type File struct {
	Path     string
	Required bool
}

// Apply sets each flag that the command line does not set. It takes the value from the environment,
// which lookupEnv reads, or else from the configuration file. The whole file is checked before any
// flag is set, including keys that have no effect.
func Apply(flags []Flag, file File, lookupEnv func(string) (string, bool)) error {
	entries, err := readEntries(flags, file)
	if err != nil {
		return err
	}
	for _, f := range flags {
		if f.OnCommandLine || f.Set == nil {
			continue
		}
		name := EnvironmentName(f.Name)
		if text, ok := lookupEnv(name); ok && text != "" {
			// an empty variable counts as unset, so that a unit can unset one
			for _, value := range splitValues(f.Kind, text) {
				if err := f.Set(value); err != nil {
					return fmt.Errorf("%s in the environment: %w", name, err)
				}
			}
			continue
		}
		e, ok := entries[f.Name]
		if !ok {
			continue
		}
		for _, value := range e.values {
			if err := f.Set(value); err != nil {
				return fmt.Errorf("%s, line %d: %s: %w", file.Path, e.line, f.Name, err)
			}
		}
	}
	return nil
}

// splitValues returns the values that an environment variable contains for a setting of the given
// kind. A list is separated by commas.
func splitValues(kind Kind, text string) []string {
	if kind != List {
		return []string{text}
	}
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// FromEnvironment reads the environment of this process. It is the usual lookupEnv argument of
// Apply.
var FromEnvironment = os.LookupEnv
