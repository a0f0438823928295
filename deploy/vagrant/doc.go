// Package vagrant has the Vagrantfile for machines of a cluster file. It has tests only.
package vagrant
