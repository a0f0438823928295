// Package settings gives a daemon's flags values from its environment and from a configuration file: a flag on the command
// line comes first, then the environment, then the file, then the default. A key of the file is the flag's name; in the
// environment it is in upper case, with KEELSON_ in front and _ for -.
package settings

import (
	"fmt"
	"os"
	"strings"
)

// MaxSize bounds a configuration file, in bytes.
const MaxSize = 1 << 20

// Kind is what the value of a key has to be in the file.
type Kind int

const (
	Text       Kind = iota // text, or a number as it is written
	Bool                   // true or false
	Integer                // a whole number
	List                   // a list, of which each is set after the other
	JoinedList             // a list that is set as one text, with commas between
)

func (k Kind) String() string {
	return [...]string{"text", "true or false", "a whole number", "a list", "a list"}[k]
}

// Flag is one setting.
type Flag struct {
	Name string
	Kind Kind
	// OnCommandLine says that the command line has it: then nothing else counts.
	OnCommandLine bool
	// Set gives it a value; nil: the key may stand in the file, and this command has no use for it.
	Set func(string) error
}

// EnvironmentName is the name of a flag in the environment.
func EnvironmentName(flag string) string {
	return "KEELSON_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Usage is what a flag's help says, and in the end how the flag is called elsewhere.
func Usage(flag, usage string) string {
	return usage + " [key " + flag + ", " + EnvironmentName(flag) + "]"
}

// File is a configuration file: "" is none. One that was asked for by its name must exist; that at the default path need not.
type File struct {
	Path     string
	Required bool
}

// Apply sets what the command line has not: by the environment, which lookup reads, else by the file. All of the file is judged,
// also what does not count, before anything is set.
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
		if text, ok := lookupEnv(name); ok && text != "" { // an empty one is none: so a unit can take one back
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

// splitValues are the values of a text in the environment.
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

// FromEnvironment is os.LookupEnv.
var FromEnvironment = os.LookupEnv
